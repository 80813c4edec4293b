"""Handoffs that end in the middle, on each path: which side is notified of what, and when.

The first bytes have landed when the event happens. The engines immediately overwrite released and
free blocks, so that a late write shows. Then another handoff completes between the same agents.

A lane has one path, slow reads, and its agents. Lanes play side by side, but only one computes.
The first agent of a side is its engine's home; events happen to the last.
"""

import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from anyio import Lock, create_task_group, to_thread

from kvbus.errors import ErrorCode, PeerLost
from kvbus.protocol import Outcome
from tests.process.faults.conftest import SLOW_READS
from tests.support.agents import AgentProcess, Agents, agents_ended, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    SpreadEngine,
    engine,
    failure_of,
    make_spec,
    spread_engine,
    start_long_read,
    works,
)

LEASE_S, WITHHELD_S = 3.0, 60.0
"""Timeouts for a stopped or killed agent."""
SLICES = {"slice_bytes": 4096}
RING = {"staging_bytes": 4 << 18, "slot_bytes": 1 << 18}
SPARE_BLOCKS = 16


class Left(Exception):
    """An engine leaves without waiting."""


@dataclass
class Lane:
    """The agents of one path; only the lane that holds ``turn`` computes."""

    agents: Agents
    turn: Lock
    settings: Mapping[str, Mapping[str, Any]]
    num_agents: ClassVar[int] = 1
    prefill: list[AgentProcess] = field(default_factory=list)
    decode: list[AgentProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings: dict[str, dict[str, Any]] = {
            "prefill": {"late_read_s": 1.0},
            "decode": {
                "lease_s": LEASE_S,
                "request_timeout_s": LEASE_S,
                "quarantine_timeout_s": WITHHELD_S,
            },
        }
        for role, of_side in (("prefill", self.prefill), ("decode", self.decode)):
            more = {**settings[role], **self.settings.get(role, {})}
            of_side += [self.agents.prepare(role, **more) for _ in range(self.num_agents)]

    def side(self, role: str) -> list[AgentProcess]:
        return self.prefill if role == "prefill" else self.decode

    @asynccontextmanager
    async def engine(self, role: str) -> AsyncIterator[Engine]:
        async with AsyncExitStack() as stack:
            async with self.turn:
                made = await stack.enter_async_context(self._open(role))
            made.control.overwrites = True
            yield made

    def _open(self, role: str) -> AbstractAsyncContextManager[Engine]:
        spec = make_spec(groups=(LARGE,))
        attach = self.side(role)[0].attach
        return engine(attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=len(role))

    async def wait_under_way(self) -> None:
        """Return once the agent of the event takes part in the handoff."""

    async def leave(self, one: Engine) -> None:
        """Close the engine, or its rank at the agent of the event, before the turn ends.

        Engines of another lane block the event loop for longer than a mapped read takes.
        """
        await one.control.aclose()
        raise Left

    def is_withheld(self, target: Engine, fetch: Any) -> bool:
        """Whether the agent may still write for the fetch."""
        return not fetch.are_blocks_free

    def num_leases(self) -> int:
        return sum(int(agent.status()["counts"]["leases"]) for agent in self.prefill)

    def num_mappings(self, engine_id: str) -> int:
        return sum(agent.memory_maps(engine_id) for agent in (*self.prefill, *self.decode))


@dataclass
class SpreadLane(Lane):
    """Engines of two ranks at two agents."""

    num_agents: ClassVar[int] = 2

    def _open(self, role: str) -> AbstractAsyncContextManager[Engine]:
        spec = make_spec(tp=2, groups=(LARGE,))
        return spread_engine(self.side(role), spec, num_blocks=NUM_LARGE_BLOCKS, seed=len(role))

    async def wait_under_way(self) -> None:
        await until(lambda: self.decode[-1].metric("data_jobs"))

    async def leave(self, one: Engine) -> None:
        assert isinstance(one, SpreadEngine)
        await one.lose(1)


@dataclass
class HostLane(Lane):
    """Engines that copy through host blocks."""

    def _open(self, role: str) -> AbstractAsyncContextManager[Engine]:
        attach, spec = self.side(role)[0].attach, make_spec(groups=(LARGE,))
        num, more = NUM_LARGE_BLOCKS, SPARE_BLOCKS
        return engine(attach, spec, num_blocks=num, ring_blocks=num + more, seed=len(role))

    async def leave(self, one: Engine) -> None:
        raise Left

    def is_withheld(self, target: Engine, fetch: Any) -> bool:
        return target.ring.num_held > 0


Settings = dict[str, dict[str, Any]]
LANES: dict[str, tuple[type[Lane], Settings]] = {
    "direct": (Lane, {"prefill": SLOW_READS, "decode": {**SLOW_READS, "path": "direct"}}),
    "staged": (Lane, {"prefill": SLOW_READS, "decode": {**SLOW_READS, **RING, "path": "staged"}}),
    "packed": (
        Lane,
        {"prefill": {**SLOW_READS, **RING}, "decode": {**SLOW_READS, **RING, "path": "packed"}},
    ),
    "shared memory": (Lane, {"prefill": SLICES, "decode": {**SLICES, "path": "direct"}}),
    "mapped": (Lane, {"decode": {**SLICES, "mapped": True, "path": "mapped"}}),
    "several agents": (
        SpreadLane,
        {"prefill": SLOW_READS, "decode": {**SLOW_READS, "path": "direct"}},
    ),
    "host memory": (HostLane, {"prefill": SLOW_READS, "decode": SLOW_READS}),
}

PREFILL, DECODE = "prefill", "decode"
PLAYED_WITHIN_S = 600.0
DEADLINE_S = 6.0
"""The deadline of a fetch that would not end; its first bytes land before."""


@dataclass
class Handoff:
    lane: Lane
    source: Engine
    target: Engine
    offer: Any
    fetch: Any


Happen = Callable[[Handoff], Awaitable[None]]


@dataclass(frozen=True)
class Event:
    """An event at the engine or the agent of a ``role``, and its ``undo``.

    ``then`` follows while the fetch has not failed yet. After a ``is_harmless`` event the same
    engines hand over again; if it ``is_survived``, the fetch completes.
    """

    role: str
    happen: Happen
    then: Happen | None = None
    undo: Happen | None = None
    is_harmless: bool = False
    is_survived: bool = False
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
    """Resume the decode agent after its lease expired, with bytes in flight."""
    await until(lambda: not handoff.lane.num_leases())
    handoff.lane.side(DECODE)[-1].signal(signal.SIGCONT)


def kill(role: str) -> Happen:
    async def happen(handoff: Handoff) -> None:
        handoff.lane.side(role)[-1].kill()

    return happen


async def start(*agents: AgentProcess) -> None:
    """Start agents; only the thread of the event loop forks."""
    for agent in agents:
        agent.launch()
    for agent in agents:
        await to_thread.run_sync(agent.wait_started)


def restart(role: str) -> Happen:
    async def undo(handoff: Handoff) -> None:
        await start(handoff.lane.side(role)[-1])

    return undo


STOP, RESUME = signal.SIGSTOP, signal.SIGCONT
EVENTS = {
    "withdrawn": Event(PREFILL, withdraw, is_harmless=True),
    "cancelled": Event(DECODE, cancel, is_harmless=True),
    "prefill engine leaves": Event(PREFILL, lose_source),
    "decode engine leaves": Event(DECODE, lose_target),
    "prefill agent stopped": Event(
        PREFILL,
        send(PREFILL, STOP),
        undo=send(PREFILL, RESUME),
        is_harmless=True,
        timeout_s=DEADLINE_S,
    ),
    "decode agent stopped": Event(
        DECODE, send(DECODE, STOP), then=outlast_the_lease, is_harmless=True, is_survived=True
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
"""The bytes arrive without the prefill agent; the renewal or the commit then fails."""
GONE = {*(ErrorCode.PEER_LOST, ErrorCode.PEER_UNREACHABLE, ErrorCode.TRANSFER_FAILED), *NO_ANSWER}
"""Codes after an agent was killed and did not return by the deadline."""
TRIED = ("reading", "waiting", "resolving", "acquiring", "committing")
REPEATED = ("reading", "resolving")
"""A read may fail before its agent knows that the engine has left: the fetch is repeated then."""


@dataclass(frozen=True)
class Expected:
    """The decode engine's failure, one of ``codes`` (None: completed), and the offer's outcome.

    ``offer`` is None if the prefill engine or its agent has ended. ``is_withheld``: the blocks
    return only after the event is undone; None where that depends on the moment.
    """

    codes: Set[ErrorCode | None]
    offer: Outcome | None
    stages: tuple[str, ...] = ("reading",)
    is_withheld: bool | None = None


WAYS = [name for name in LANES if name != "shared memory"]
"""Shared memory differs from TCP only where the prefill agent ends."""
MAPPED_TO_ONE = ("direct", "staged", "packed", "mapped")
WITHOUT_PREFILL = Expected(NO_ANSWER, Outcome.WITHDRAWN, stages=AT_THE_END, is_withheld=False)
EXPECTED: dict[str, dict[str, Expected]] = {
    "withdrawn": dict.fromkeys(WAYS, Expected({ErrorCode.OFFER_WITHDRAWN}, Outcome.WITHDRAWN)),
    "cancelled": dict.fromkeys(WAYS, Expected({ErrorCode.CANCELLED}, Outcome.COMPLETED)),
    "prefill engine leaves": dict.fromkeys(WAYS, Expected(LOST, None, stages=REPEATED))
    | {"several agents": Expected(LOST_IN_PART, Outcome.WITHDRAWN)},
    "decode engine leaves": dict.fromkeys(
        MAPPED_TO_ONE, Expected(LOST, Outcome.COMPLETED, stages=("",))
    )
    | {"several agents": Expected(LOST, Outcome.COMPLETED)},
    "prefill agent stopped": dict.fromkeys(
        LANES, Expected(NO_ANSWER, Outcome.WITHDRAWN, is_withheld=True)
    )
    | {
        "mapped": WITHOUT_PREFILL,
        "shared memory": WITHOUT_PREFILL,
        "packed": Expected(GONE, Outcome.WITHDRAWN, stages=TRIED),
    },
    "decode agent stopped": dict.fromkeys(
        MAPPED_TO_ONE, Expected({None}, Outcome.COMPLETED, stages=("",))
    ),
    "prefill agent killed": dict.fromkeys(LANES, Expected(GONE, Outcome.WITHDRAWN, stages=TRIED)),
    "decode agent killed": dict.fromkeys(
        WAYS,
        Expected({ErrorCode.PEER_LOST}, Outcome.COMPLETED, stages=("lost",), is_withheld=False),
    )
    | {"several agents": Expected(GONE, Outcome.COMPLETED, stages=TRIED)},
}
"""By event, and by lane."""
ALL = {lane: [event for event in EVENTS if lane in EXPECTED[event]] for lane in LANES}
KILLED = ["prefill agent killed", "decode agent killed"]
SOME = {
    "direct": ["decode engine leaves", "prefill agent stopped", "decode agent stopped", *KILLED],
    "staged": ["cancelled", "decode engine leaves", *KILLED],
    "packed": ["withdrawn", "prefill engine leaves", *KILLED],
    "shared memory": ["prefill agent stopped", "prefill agent killed"],
    "mapped": ["withdrawn", "prefill engine leaves", "decode engine leaves", *KILLED],
    "several agents": [
        "cancelled",
        "prefill engine leaves",
        "decode engine leaves",
        "prefill agent killed",
    ],
    "host memory": ["withdrawn", "cancelled", *KILLED],
}


@dataclass
class Seen:
    """The notices of both engines."""

    code: ErrorCode | None = None
    stage: str = ""
    offer: Outcome | None = None
    is_withheld: bool = False


async def play(lane: Lane, event: Event, expected: Expected) -> Seen:
    seen, has_left = Seen(), True
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
                await follow(handoff, event, seen, needs_undo=expected.is_withheld is not False)
                if event.is_harmless:
                    async with lane.turn:
                        assert await works(source, target)
        if has_left:
            await follow_without(handoff, event, seen)
        await until(lambda: not lane.num_mappings(other.spec.engine_id))
        async with lane.engine(event.role) as again:
            if event.role == DECODE:
                if not event.is_survived:
                    some = {"num_tokens": LARGE.block_size, "block_ids": {LARGE.name: [1]}}
                    await again.decode.fetch(handoff.offer.ticket, **some).ended
                seen.offer = await handoff.offer.ended
            async with lane.turn:
                assert await works(*in_order(event, staying, again))
    await to_thread.run_sync(lane.agents.check)
    return seen


def in_order(event: Event, staying: Engine, other: Engine) -> tuple[Engine, Engine]:
    return (other, staying) if event.role == PREFILL else (staying, other)


async def follow(handoff: Handoff, event: Event, seen: Seen, *, needs_undo: bool) -> None:
    lane, offer, fetch = handoff.lane, handoff.offer, handoff.fetch
    if event.then is not None:
        await event.then(handoff)
    if event.is_survived:
        await fetch.ended
    else:
        await note_failure(handoff, seen)
    if not needs_undo:
        await fetch.freed
        seen.is_withheld = False
    if event.role == DECODE:
        await until(lambda: not lane.num_leases())
    if event.undo is not None:
        await event.undo(handoff)
    await fetch.freed
    await until(lambda: not lane.is_withheld(handoff.target, fetch))
    if event.role == PREFILL:
        with suppress(PeerLost):
            await offer.withdraw()
            seen.offer = await offer.ended


async def follow_without(handoff: Handoff, event: Event, seen: Seen) -> None:
    """Like `follow`, for an engine that has left and is not notified."""
    lane, fetch = handoff.lane, handoff.fetch
    if event.role == PREFILL:
        await note_failure(handoff, seen)
        await fetch.freed
        await until(lambda: not lane.is_withheld(handoff.target, fetch))
    else:
        lost = {"engine_id": handoff.target.spec.engine_id}
        await until(lambda: lane.decode[0].logged("handoff.failed", **lost))
        seen.code = ErrorCode(lane.decode[0].logged("handoff.failed", **lost)[-1]["code"])
        await until(lambda: not lane.num_leases())


async def note_failure(handoff: Handoff, seen: Seen) -> None:
    failure = await failure_of(handoff.fetch)
    seen.code, seen.stage = failure.code, failure.stage
    seen.is_withheld = handoff.lane.is_withheld(handoff.target, handoff.fetch)


def is_expected(lane: str, event: str, seen: Seen) -> bool:
    expected = EXPECTED[event][lane]
    # a home that has read its own ranks waits for the parts of other agents
    waits = ("waiting",) if lane == "several agents" and "reading" in expected.stages else ()
    return (
        seen.code in expected.codes
        and seen.stage in (*expected.stages, *waits)
        and seen.offer == expected.offer
        and expected.is_withheld in (None, seen.is_withheld)
    )


async def play_lane(name: str, events: Sequence[str], turn: Lock, failures: list[str]) -> None:
    """Play events of one lane in turn; after a failure, continue with new agents."""
    left = list(events)
    while left:
        try:
            with agents_ended(Agents) as agents:
                kind, settings = LANES[name]
                lane = kind(agents, turn, settings)
                await start(*agents.all)
                while left:
                    event = left.pop(0)
                    seen = await play(lane, EVENTS[event], EXPECTED[event][name])
                    if not is_expected(name, event, seen):
                        failures.append(f"{name}, {event}: {seen}")
        except Exception as error:  # every lane plays to its end
            failures.append(f"{name}, {event}: {''.join(traceback.format_exception(error))}")


@pytest.mark.anyio
@pytest.mark.timeout(PLAYED_WITHIN_S)
@pytest.mark.parametrize(
    "plays", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"]
)
async def test_end_of_handoff_is_reported_and_blocks_return(
    plays: Mapping[str, Sequence[str]],
) -> None:
    turn, failures = Lock(), list[str]()
    async with create_task_group() as tasks:
        for name, events in plays.items():
            tasks.start_soon(play_lane, name, events, turn, failures)
    assert not failures, "\n\n".join(failures)
