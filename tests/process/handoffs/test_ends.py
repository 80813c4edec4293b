"""What ends a handoff in the middle, by whichever way its bytes go: who is told what, and when.

Its first bytes have landed when it happens. The prefill engine writes over what it is told is
released, and the decode engine over what it is told is free: nothing may land there any more. Then
another handoff completes between the same agents, those that were killed having been started again.

All lanes are played at once, and what needs the cores in turn: most of it is waiting.
"""

import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio import Lock, create_task_group, to_thread

from kvbus.errors import ErrorCode, PeerLost
from kvbus.protocol import Outcome
from tests.process.handoffs.lanes import LANES, Lane, Left
from tests.support.agents import Agents, agents_ended, until, wait_until
from tests.support.engines import LARGE, Engine, failure_of, start_long_read, works

PREFILL, DECODE = "prefill", "decode"
PLAYED_WITHIN_S = 600.0
DEADLINE_S = 15.0
"""Of a fetch that nothing else ends; it has begun to land by then."""


@dataclass
class Handoff:
    """A handoff in the middle of its bytes."""

    lane: Lane
    source: Engine
    target: Engine
    offer: Any
    fetch: Any


Happen = Callable[[Handoff], Awaitable[None]]


@dataclass(frozen=True)
class Event:
    """What happens to the engine or the agent of a ``role``, and what undoes it later."""

    role: str
    happen: Happen
    then: Happen | None = None
    """What follows while the fetch has not failed yet."""
    undo: Happen | None = None
    is_harmless: bool = False
    """Whether the same engines go on."""
    is_survived: bool = False
    """Whether the fetch completes all the same."""
    timeout_s: float | None = None


async def withdraw(handoff: Handoff) -> None:
    await handoff.offer.withdraw()


async def cancel(handoff: Handoff) -> None:
    await handoff.fetch.cancel()


async def lose_source(handoff: Handoff) -> None:
    await handoff.lane.leave(handoff.source)


async def lose_target(handoff: Handoff) -> None:
    await handoff.lane.leave(handoff.target)


def send(role: str, number: signal.Signals) -> Happen:
    async def happen(handoff: Handoff) -> None:
        handoff.lane.side(role)[-1].signal(number)

    return happen


async def outlast_the_lease(handoff: Handoff) -> None:
    """The stopped decode agent goes on when it has lost its lease, with bytes on their way."""
    await until(lambda: not handoff.lane.num_leases())
    handoff.lane.side(DECODE)[-1].signal(signal.SIGCONT)


def kill(role: str) -> Happen:
    async def happen(handoff: Handoff) -> None:
        handoff.lane.side(role)[-1].kill()

    return happen


def restart(role: str) -> Happen:
    async def undo(handoff: Handoff) -> None:
        agent = handoff.lane.side(role)[-1]
        agent.launch()
        await to_thread.run_sync(agent.wait_started)

    return undo


EVENTS = {
    "withdrawn": Event(PREFILL, withdraw, is_harmless=True),
    "cancelled": Event(DECODE, cancel, is_harmless=True),
    "prefill engine leaves": Event(PREFILL, lose_source),
    "decode engine leaves": Event(DECODE, lose_target),
    "prefill agent stopped": Event(
        PREFILL,
        send(PREFILL, signal.SIGSTOP),
        undo=send(PREFILL, signal.SIGCONT),
        is_harmless=True,
        timeout_s=DEADLINE_S,
    ),
    "decode agent stopped": Event(
        DECODE,
        send(DECODE, signal.SIGSTOP),
        then=outlast_the_lease,
        is_harmless=True,
        is_survived=True,
    ),
    "prefill agent killed": Event(
        PREFILL, kill(PREFILL), undo=restart(PREFILL), timeout_s=DEADLINE_S
    ),
    "decode agent killed": Event(DECODE, kill(DECODE), undo=restart(DECODE), timeout_s=DEADLINE_S),
}

NO_ANSWER = {ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT}
LOST = {ErrorCode.ENGINE_LOST}
LOST_IN_PART = {*LOST, ErrorCode.ENGINE_UNKNOWN, ErrorCode.STALE, ErrorCode.TRANSFER_FAILED}
AT_THE_END = ("reading", "committing")
"""The bytes come without the prefill agent, which is missed when the lease is renewed, or taken."""
GONE = {
    *(ErrorCode.PEER_LOST, ErrorCode.PEER_UNREACHABLE, ErrorCode.TRANSFER_FAILED),
    *NO_ANSWER,
}
"""Of an agent that is killed, and not there again by the deadline."""
TRIED = ("reading", "waiting", "resolving", "acquiring", "committing")
REPEATED = ("reading", "resolving")
"""A read may fail before its agent knows that the engine has left: the fetch is repeated then."""


@dataclass(frozen=True)
class Expected:
    """What the decode engine is told, one of ``codes`` (None: completed), and the offer's end."""

    codes: Set[ErrorCode | None]
    offer: Outcome | None
    """None when nobody is told, as the engine or its agent is gone."""
    stages: tuple[str, ...] = ("reading",)
    is_withheld: bool | None = None
    """Whether blocks come back only after it is undone; None where that depends on the moment."""


WAYS = [name for name in LANES if name != "shared memory"]
"""All but the one of which only the end of the prefill agent is another than over TCP."""
EXPECTED = {
    "withdrawn": dict.fromkeys(WAYS, Expected({ErrorCode.OFFER_WITHDRAWN}, Outcome.WITHDRAWN)),
    "cancelled": dict.fromkeys(WAYS, Expected({ErrorCode.CANCELLED}, Outcome.COMPLETED)),
    "prefill engine leaves": dict.fromkeys(WAYS, Expected(LOST, None, stages=REPEATED))
    | {"several agents": Expected(LOST_IN_PART, Outcome.WITHDRAWN)},
    "decode engine leaves": dict.fromkeys(
        ("direct", "staged", "packed", "mapped"), Expected(LOST, Outcome.COMPLETED, stages=("",))
    )
    | {"several agents": Expected(LOST, Outcome.COMPLETED)},
    "prefill agent stopped": dict.fromkeys(
        LANES, Expected(NO_ANSWER, Outcome.WITHDRAWN, is_withheld=True)
    )
    | {
        "mapped": Expected(NO_ANSWER, Outcome.WITHDRAWN, stages=AT_THE_END, is_withheld=False),
        "shared memory": Expected(
            NO_ANSWER, Outcome.WITHDRAWN, stages=AT_THE_END, is_withheld=False
        ),
        "packed": Expected(GONE, Outcome.WITHDRAWN, stages=TRIED),
    },
    "decode agent stopped": dict.fromkeys(
        ("direct", "staged", "packed", "mapped"),
        Expected({None}, Outcome.COMPLETED, stages=("",)),
    ),
    "prefill agent killed": dict.fromkeys(LANES, Expected(GONE, Outcome.WITHDRAWN, stages=TRIED)),
    "decode agent killed": dict.fromkeys(
        WAYS,
        Expected({ErrorCode.PEER_LOST}, Outcome.COMPLETED, stages=("lost",), is_withheld=False),
    )
    | {"several agents": Expected(GONE, Outcome.COMPLETED, stages=TRIED)},
}
"""By event, and by lane."""


@dataclass
class Told:
    """What the engines were told."""

    code: ErrorCode | None = None
    stage: str = ""
    offer: Outcome | None = None
    is_withheld: bool = False


async def play(lane: Lane, event: Event, expected: Expected) -> Told:
    """Have it happen to a handoff, and see that all goes on after it."""
    told, has_left = Told(), True
    stays = DECODE if event.role == PREFILL else PREFILL
    async with lane.engine(stays) as staying:
        with suppress(Left):
            async with lane.engine(event.role) as other:
                source, target = in_order(event, staying, other)
                async with lane.turn:
                    begun = await start_long_read(source, target, timeout_s=event.timeout_s)
                    handoff = Handoff(lane, source, target, *begun)
                    await lane.wait_under_way()
                    await event.happen(handoff)
                has_left = False
                await follow(handoff, event, told, needs_undo=expected.is_withheld is not False)
                if event.is_harmless:
                    async with lane.turn:
                        assert await works(source, target)
        if has_left:
            await follow_without(handoff, event, told)
        await until(lambda: not lane.num_mappings(other.spec.engine_id))
        async with lane.engine(event.role) as again:
            if event.role == DECODE:
                if not event.is_survived:
                    await read_again(handoff.offer, again)
                told.offer = await handoff.offer.ended
            async with lane.turn:
                assert await works(*in_order(event, staying, again))
    await to_thread.run_sync(lane.agents.check)
    return told


def in_order(event: Event, staying: Engine, other: Engine) -> tuple[Engine, Engine]:
    """The prefill and the decode engine."""
    return (other, staying) if event.role == PREFILL else (staying, other)


async def follow(handoff: Handoff, event: Event, told: Told, *, needs_undo: bool) -> None:
    """Both engines are told; returns once nothing is withheld."""
    lane, offer, fetch = handoff.lane, handoff.offer, handoff.fetch
    if event.then is not None:
        await event.then(handoff)
    if event.is_survived:
        await fetch.ended
    else:
        await note_failure(handoff, told)
    if not needs_undo:
        await fetch.freed
        told.is_withheld = False
    if event.role == DECODE:
        await until(lambda: not lane.num_leases())
    if event.undo is not None:
        await event.undo(handoff)
    await fetch.freed
    await until(lambda: not lane.is_withheld(handoff.target, fetch))
    if event.role == PREFILL:
        with suppress(PeerLost):
            await offer.withdraw()
            told.offer = await offer.ended


async def follow_without(handoff: Handoff, event: Event, told: Told) -> None:
    """The same, where the engine that it happened to hears nothing."""
    lane, fetch = handoff.lane, handoff.fetch
    if event.role == PREFILL:
        await note_failure(handoff, told)
        await fetch.freed
        await until(lambda: not lane.is_withheld(handoff.target, fetch))
    else:
        lost = {"engine_id": handoff.target.spec.engine_id}
        await until(lambda: lane.decode[0].logged("handoff.failed", **lost))
        told.code = ErrorCode(lane.decode[0].logged("handoff.failed", **lost)[-1]["code"])
        await until(lambda: not lane.num_leases())


async def note_failure(handoff: Handoff, told: Told) -> None:
    failure = await failure_of(handoff.fetch)
    told.code, told.stage = failure.code, failure.stage
    told.is_withheld = handoff.lane.is_withheld(handoff.target, handoff.fetch)


async def read_again(offer: Any, target: Engine) -> None:
    """Have another engine read an offer."""
    fetch = target.decode.fetch(
        offer.ticket, num_tokens=LARGE.block_size, block_ids={LARGE.name: [1]}
    )
    await fetch.ended


Played = dict[str, Told | str]
"""By event; a failure is its trace."""


async def play_lane(name: str, events: list[str], turn: Lock) -> Played:
    """Play events of one lane in turn; after a failure, go on with new agents."""
    ended: Played = {}
    while left := [event for event in events if event not in ended]:
        current = left[0]
        try:
            with agents_ended(Agents) as agents:
                kind, settings = LANES[name]
                lane = kind(agents, turn, settings)
                for agent in agents.all:
                    agent.launch()
                for agent in agents.all:
                    await to_thread.run_sync(agent.wait_started)
                for current in left:
                    ended[current] = await play(lane, EVENTS[current], EXPECTED[current][name])
        except Exception as error:  # which the test of this event raises
            ended[current] = "".join(traceback.format_exception(error))
    return ended


async def play_lanes(wanted: dict[str, list[str]]) -> dict[str, Played]:
    """All of them at once."""
    played: dict[str, Played] = {}
    turn = Lock()

    async def note(name: str) -> None:
        played[name] = await play_lane(name, wanted[name], turn)

    async with create_task_group() as tasks:
        for name in wanted:
            tasks.start_soon(note, name)
    return played


# Each worker of pytest-xdist would play all lanes. They share them instead: a lane is played by who
# makes its file first, and the others read the outcome from there.
@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Played]:
    """By lane, how those events ended whose tests are to be run."""
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            params = item.callspec.params
            wanted.setdefault(str(params["lane"]), []).append(str(params["event"]))
    folder, num_workers = tmp_path_factory.getbasetemp(), 1
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, num_workers = folder.parent, int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    share = -(-len(wanted) // num_workers)
    while acquired := list(islice((name for name in wanted if acquire(folder, name)), share)):
        for name, ended in anyio.run(play_lanes, {one: wanted[one] for one in acquired}).items():
            write_played(folder, name, ended)
    return {name: read_played(folder, name) for name in wanted}


def acquire(folder: Path, lane: str) -> bool:
    """Whether this process is the first that asks."""
    try:
        (folder / f"{lane}.acquired").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write_played(folder: Path, lane: str, ended: Played) -> None:
    (folder / f"{lane}.new").write_bytes(msgspec.json.encode(ended))
    (folder / f"{lane}.new").rename(folder / f"{lane}.played")


def read_played(folder: Path, lane: str) -> Played:
    path = folder / f"{lane}.played"
    wait_until(path.exists, f"another worker has played '{lane}'", PLAYED_WITHIN_S)
    return msgspec.json.decode(path.read_bytes(), type=Played)


@pytest.mark.timeout(PLAYED_WITHIN_S)
@pytest.mark.parametrize(
    ("lane", "event"),
    [(lane, event) for lane in LANES for event in EVENTS if lane in EXPECTED[event]],
)
def test_end_of_handoff_is_told_and_blocks_return_untouched(
    played: dict[str, Played], lane: str, event: str
) -> None:
    told = played[lane][event]
    if isinstance(told, str):
        pytest.fail(told)

    expected = EXPECTED[event][lane]
    assert told.code in expected.codes
    # a home that has read its own ranks waits for the parts of other agents
    waits = ("waiting",) if lane == "several agents" and "reading" in expected.stages else ()
    assert told.stage in (*expected.stages, *waits)
    assert told.offer == expected.offer
    assert expected.is_withheld in (None, told.is_withheld)
