"""An engine at several agents that lose each other, or end, while one reads for another.

Blocks return after the last write, and stay as they are.
"""

import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest
from msgspec.structs import replace

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from kvbus.keys.trusted import revoke_trusted
from kvbus.protocol import CancelPart, FetchPart, Role, to_body
from tests.process.faults.conftest import SLOW_READS, Started
from tests.support.agents import AgentProcess, agents_ended, until
from tests.support.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    SpreadEngine,
    failure_of,
    make_spec,
    spread_engine,
    start_long_read,
    works,
)
from tests.support.keyring import OBSERVER, KeyRing
from tests.support.late_links import LINKED, LateLink, late_link, look_past_link
from tests.support.plain_sockets import ask, plain_socket
from tests.unit.vectors.golden import example

pytestmark = pytest.mark.anyio

LONG = pytest.mark.long
KILLED = "it is killed for good"
A_MINUTE_S, TIMEOUT_S, PATIENT_S, QUARANTINE_S = 60.0, 3.0, 20.0, 2.0
ANSWERS_AFTER_S = 6.0
LATE_S = 30.0
"""The home waits this long for a late request (`parts.LATE_S`)."""
MAX_SESSIONS = 1024
"""The limit of one peer socket."""
NOT_VALID = {
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.ENGINE_UNKNOWN,
    ErrorCode.ENGINE_LOST,
}


@dataclass
class Quad:
    """Two agents of each role with slow reads; other agents reach ``other`` at ``other_peer``."""

    agents: Started
    ring: KeyRing
    other_peer: str = ""


Quads = Callable[[bool], Quad]


@contextmanager
def four_agents(*, keyed: bool = False, linked: bool = True) -> Iterator[Quad]:
    with agents_ended(Started) as agents:
        ring = KeyRing(agents.folder / "keys")
        ring.folder.mkdir()
        more: dict[str, dict[str, Any]] = {
            "prefill": SLOW_READS,
            "decode": {**SLOW_READS, "quarantine_timeout_s": QUARANTINE_S, "path": "direct"},
        }
        for name in ("prefill0", "prefill1", "home", "other"):
            role = Role.PREFILL if name.startswith("prefill") else Role.DECODE
            if keyed:
                ring.prepare(agents, role, name, **more[role])
            else:
                agents.prepare(str(role), **more[role])
        other = agents.all[-1]
        if linked:
            other.settings |= LINKED
        if keyed:
            trusted = shutil.copy(ring.trusted, agents.folder / "other")
            other.settings["authorized_keys"] = str(trusted)
        agents.start(*agents.all)
        yield Quad(agents, ring, other.peer)


@pytest.fixture(scope="module")
def shared_quads() -> Iterator[Quads]:
    with ExitStack() as stack:
        yield cache(lambda keyed: stack.enter_context(four_agents(keyed=keyed)))


@dataclass
class Spread:
    """Engines of two ranks at two agents each; the decode engine's are ``home`` and ``other``."""

    source: SpreadEngine
    target: SpreadEngine
    prefill: list[AgentProcess]
    home: AgentProcess
    other: AgentProcess
    link: LateLink
    """From the home to the other one, if they are linked."""
    ring: KeyRing

    @property
    def num_parts(self) -> int:
        return int(self.other.status()["counts"]["parts"])

    async def start_read(self, timeout_s: float) -> tuple[Offer, Fetch]:
        offer, fetch = await start_long_read(self.source, self.target, timeout_s=timeout_s)
        await until(lambda: self.num_parts)
        return offer, fetch


@asynccontextmanager
async def spread(quad: Quad) -> AsyncIterator[Spread]:
    *prefill, home, other = quad.agents.all
    other.started["peer"] = quad.other_peer
    home.skip_log()
    shapes: dict[str, Any] = {"num_blocks": NUM_LARGE_BLOCKS}
    specs = [make_spec(tp=2, groups=(LARGE,)) for _ in range(2)]
    async with (
        late_link(other) as link,
        spread_engine(prefill, specs[0], seed=1, **shapes) as source,
        spread_engine([home, other], specs[1], seed=2, **shapes) as target,
    ):
        look_past_link(other)
        yield Spread(source, target, prefill, home, other, link, quad.ring)
    quad.agents.check()


@dataclass(frozen=True)
class Hurt:
    """A fault of the other agent or of the link; ``undo`` comes before the blocks return."""

    do: Callable[[Spread], object]
    undo: Callable[[Spread], object] = lambda _: None
    codes: tuple[ErrorCode, ...] = (ErrorCode.TIMEOUT,)
    timeout_s: float = TIMEOUT_S
    withheld_s: float = 0.0
    """The least time from the failure to the return of the blocks."""
    keyed: bool = False
    is_early: bool = False
    """Whether it is done before the home requests the part."""


def trusted_by_other(pair: Spread) -> Path:
    return Path(pair.other.settings["authorized_keys"])


HURTS = {
    "it distrusts the home": Hurt(
        lambda pair: revoke_trusted(trusted_by_other(pair), "home"),
        lambda pair: shutil.copy(pair.ring.trusted, trusted_by_other(pair)),
        codes=tuple(ErrorCode),
        timeout_s=PATIENT_S,
        keyed=True,
    ),
    KILLED: Hurt(lambda pair: pair.other.kill()),
    "it gets the request late": Hurt(
        lambda pair: setattr(pair.link, "late", "fetch_part"),
        lambda pair: pair.link.heal(),
        is_early=True,
    ),
    "it is cut off for good": Hurt(lambda pair: pair.link.take_down()),
    "it is stopped": Hurt(  # it has its connection, and writes on when it continues
        lambda pair: pair.other.signal(signal.SIGSTOP),
        lambda pair: pair.other.signal(signal.SIGCONT),
        withheld_s=LATE_S + 2 * TIMEOUT_S + QUARANTINE_S,
    ),
}


@pytest.mark.parametrize(
    "hurt", [pytest.param(name, marks=LONG if at else ()) for at, name in enumerate(HURTS)]
)
async def test_blocks_return_when_other_agent_can_write_no_more(
    shared_quads: Quads, hurt: str
) -> None:
    happens = HURTS[hurt]
    with ExitStack() as stack:
        if hurt == KILLED:
            quad = stack.enter_context(four_agents(linked=False))
        else:
            quad = shared_quads(happens.keyed)
        await play(quad, happens)


async def play(quad: Quad, happens: Hurt) -> None:
    async with spread(quad) as pair:
        if happens.is_early:
            happens.do(pair)
            offer, fetch = await start_long_read(
                pair.source, pair.target, timeout_s=happens.timeout_s
            )
        else:
            offer, fetch = await pair.start_read(happens.timeout_s)
            happens.do(pair)
        failure = await failure_of(fetch)
        ended_at = time.monotonic()
        await until(lambda: time.monotonic() >= ended_at + happens.withheld_s, within_s=A_MINUTE_S)
        withheld = not fetch.are_blocks_free
        happens.undo(pair)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.freed
        still_read = pair.other.alive and pair.num_parts
        freed = pair.target.snapshot()
        pair.link.heal()
        assert failure.code in happens.codes
        assert not failure.blocks_free
        assert withheld or not happens.withheld_s
        assert not still_read
        if pair.other.alive:
            assert await works(pair.source, pair.target, before=freed), "nothing landed after that"
        await offer.withdraw()
        await offer.ended
    await until(lambda: not pair.home.memory_maps(pair.target.spec.engine_id))


def fill_with_sessions(pair: Spread, as_key: str, names: list[str]) -> None:
    with plain_socket(pair.other.peer, pair.ring.curve(as_key, "other")) as dealer:
        for name in names:
            ping = {"v": 1, "op": "ping", "id": 1, "boot": name, "secret": name, "body": {}}
            dealer.send(msgpack.packb(ping))
        for _ in names:
            dealer.recv()


async def test_a_part_whose_session_was_ended_is_waited_for(shared_quads: Quads) -> None:
    """Others with the home's key fill the table of sessions: the part runs on all the same."""
    mine = [f"mine-{at}" for at in range(MAX_SESSIONS)]
    async with spread(shared_quads(True)) as pair:
        offer, fetch = await pair.start_read(A_MINUTE_S)
        while not pair.home.logged("handoff.retried", code="busy"):
            fill_with_sessions(pair, "home", mine)
            fill_with_sessions(pair, OBSERVER, [uuid.uuid4().hex for _ in range(8)])
            await anyio.sleep(0.01)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.ended
        still_read, freed = pair.num_parts, pair.target.snapshot()
        assert not still_read
        assert await works(pair.source, pair.target, before=freed), "nothing landed after that"
        await offer.ended


async def test_part_goes_on_when_home_asks_again_by_new_connection(shared_quads: Quads) -> None:
    async with spread(shared_quads(False)) as pair:
        offer, fetch = await pair.start_read(A_MINUTE_S)
        pair.link.cut()
        await until(lambda: pair.link.connections)
        num_parts = pair.num_parts
        await fetch.ended
        await offer.ended
        assert num_parts == 1
        assert not pair.num_parts


async def test_home_asks_once_for_end_of_part_however_late_its_answer(shared_quads: Quads) -> None:
    async with spread(shared_quads(False)) as pair:
        offer, fetch = await pair.start_read(A_MINUTE_S)
        pair.other.signal(signal.SIGSTOP)
        await fetch.cancel()
        await anyio.sleep(ANSWERS_AFTER_S)
        pair.other.signal(signal.SIGCONT)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.freed
        assert pair.link.counts["cancel_part"] == 1
        assert not pair.num_parts
        await offer.withdraw()
        await offer.ended


async def test_prefill_rank_leaving_after_read_fails_the_fetch(shared_quads: Quads) -> None:
    block: dict[str, Any] = {"num_tokens": LARGE.block_size, "block_ids": {LARGE.name: [3]}}
    async with spread(shared_quads(False)) as pair:
        source, target = pair.source, pair.target
        offer = await source.prefill.offer("r", **block, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **block, timeout_s=PATIENT_S)
        read = [engine.views()[1, 0, "v"][3] for engine in (source, target)]
        await until(lambda: read[1].equal(read[0]))
        await source.lose(1)
        await until(lambda: not pair.prefill[1].memory_maps(source.spec.engine_id))
        await offer.seal()
        failure = await failure_of(fetch)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.freed
        await offer.withdraw()
        assert failure.code in NOT_VALID


def test_a_part_that_comes_after_its_cancellation_is_refused(decode: AgentProcess) -> None:
    asked = example(FetchPart)
    cancel = CancelPart(token=asked.token)
    cancelled = ask(decode.peer, "cancel_part", to_body(cancel))
    after = ask(decode.peer, "fetch_part", to_body(asked))
    another = ask(
        decode.peer, "fetch_part", to_body(replace(asked, token=f"another-{asked.token}"))
    )
    assert cancelled["ok"] == {}
    assert after["ok"]["code"] == "cancelled"
    # an agent that has just started waits for its engines
    assert another["error"]["code"] in ("engine_unknown", "engine_not_ready")
