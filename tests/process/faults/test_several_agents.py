"""An engine at several agents: these lose sight of each other, or end, while one reads for another.

Its blocks come back when none of the agents writes any more, and no byte lands in one after that.
"""

import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest
import zmq
from msgspec.structs import replace

from kvbus.engine import Fetch, Offer
from kvbus.errors import ErrorCode
from kvbus.keys.trusted import revoke_trusted
from kvbus.protocol import CancelPart, FetchPart, Role, to_body
from tests.process.faults.conftest import DECODE, PREFILL, SLOW_READS, Started
from tests.support.agents import AgentProcess, until
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
from tests.support.plain_sockets import REPLY_WITHIN_S, apply, ask
from tests.tools.chaos.links import PROXY_HOST, Link
from tests.unit.vectors.golden import example

pytestmark = pytest.mark.anyio

LONG = pytest.mark.long
A_MINUTE_S, TIMEOUT_S, PATIENT_S, QUARANTINE_S = 60.0, 3.0, 20.0, 2.0
ANSWERS_AFTER_S = 6.0
LATE_S = 30.0
"""How late a request may come, as a home supposes (`parts.LATE_S`)."""
MAX_SESSIONS = 1024
"""Of one peer socket."""
FETCH_PART, CANCEL_PART = b"\xa2op\xaafetch_part", b"\xa2op\xabcancel_part"
"""Operations, as msgpack has them in a request."""
NOT_VALID = {
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.ENGINE_UNKNOWN,
    ErrorCode.ENGINE_LOST,
}


class LateLink(Link):
    """When it is told so, it holds back the next part and all after it."""

    is_late = False
    num_cancels = 0
    """How often the end of a part was asked for."""

    async def _let(self, some: bytes, *, is_request: bool) -> None:
        if is_request and self.is_late and FETCH_PART in some:
            self.blacken()
        self.num_cancels += is_request * some.count(CANCEL_PART)
        await self._passes.wait()

    def heal(self) -> None:
        self.is_late = False
        super().heal()


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
        """A handoff that takes long, once the other agent reads for it."""
        offer, fetch = await start_long_read(self.source, self.target, timeout_s=timeout_s)
        await until(lambda: self.num_parts)
        return offer, fetch


@asynccontextmanager
async def spread(
    fresh: Started, *, keyed: bool = False, linked: bool = True
) -> AsyncIterator[Spread]:
    """All of it, whose reads take long."""
    ring = KeyRing(fresh.folder / "keys")
    ring.folder.mkdir()

    def prepare(role: Role, name: str, **settings: Any) -> AgentProcess:
        settings = {**(PREFILL if role is Role.PREFILL else DECODE), **SLOW_READS, **settings}
        made: AgentProcess = (
            ring.prepare(fresh, role, name, **settings)
            if keyed
            else fresh.prepare(str(role), **settings)
        )
        return made

    prefill = [prepare(Role.PREFILL, f"prefill{at}") for at in range(2)]
    short = {"quarantine_timeout_s": QUARANTINE_S, "path": "direct"}
    home = prepare(Role.DECODE, "home", **short)
    other = prepare(Role.DECODE, "other", **short)
    if linked:
        other.settings["advertise_host"] = PROXY_HOST
    if keyed:
        trusted = shutil.copy(ring.trusted, fresh.folder / "other")
        other.settings["authorized_keys"] = str(trusted)
    fresh.start(*prefill, home, other)
    shapes: dict[str, Any] = {"num_blocks": NUM_LARGE_BLOCKS}
    specs = [make_spec(tp=2, groups=(LARGE,)) for _ in range(2)]
    link = LateLink(int(other.settings["peer_bind"].rpartition(":")[2]))
    await link.open()
    try:
        async with (
            spread_engine(prefill, specs[0], seed=1, **shapes) as source,
            spread_engine([home, other], specs[1], seed=2, **shapes) as target,
        ):
            other.started["peer"] = other.settings["peer_bind"]  # it is looked at without the link
            yield Spread(source, target, prefill, home, other, link, ring)
    finally:
        await link.close()


@dataclass(frozen=True)
class Hurt:
    """What is done to the other agent, or to the way to it, and undone before blocks come back."""

    do: Callable[[Spread], object]
    undo: Callable[[Spread], object] = lambda _: None
    codes: tuple[ErrorCode, ...] = (ErrorCode.TIMEOUT,)
    timeout_s: float = TIMEOUT_S
    withheld_s: float = 0.0
    """So long blocks are withheld at least, behind the failure."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_early: bool = False
    """Whether it is done before the other agent was asked."""


def trusted_by_other(pair: Spread) -> Path:
    """Whom the other agent trusts."""
    return Path(pair.other.settings["authorized_keys"])


HURTS = {
    "it distrusts the home": Hurt(
        lambda pair: revoke_trusted(trusted_by_other(pair), "home"),
        lambda pair: shutil.copy(pair.ring.trusted, trusted_by_other(pair)),
        codes=tuple(ErrorCode),
        timeout_s=PATIENT_S,
        settings={"keyed": True},
    ),
    "it is killed for good": Hurt(
        lambda pair: pair.other.kill(),
        settings={"linked": False},
    ),
    "it hears of it late": Hurt(
        lambda pair: setattr(pair.link, "is_late", True),
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
async def test_blocks_come_back_when_other_agent_can_write_no_more(
    fresh: Started, hurt: str
) -> None:
    happens = HURTS[hurt]
    async with spread(fresh, **happens.settings) as pair:
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


def fill_with_sessions(pair: Spread, as_key: str, names: list[str]) -> None:
    """Open sessions at the other agent, one for each name, or keep those that are open."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        apply(dealer, pair.ring.curve(as_key, "other"))
        dealer.connect(pair.other.peer)
        for name in names:
            ping = {"v": 1, "op": "ping", "id": 1, "boot": name, "secret": name, "body": {}}
            dealer.send(msgpack.packb(ping))
        for _ in names:
            assert dealer.poll(round(REPLY_WITHIN_S * 1000))
            dealer.recv()


async def test_a_part_whose_session_was_ended_is_waited_for(fresh: Started) -> None:
    """Others with the home's key fill the table of sessions: the part runs on all the same."""
    mine = [f"mine-{at}" for at in range(MAX_SESSIONS)]
    async with spread(fresh, keyed=True) as pair:
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


async def test_part_goes_on_when_home_asks_again_by_new_connection(
    fresh: Started,
) -> None:
    async with spread(fresh) as pair:
        offer, fetch = await pair.start_read(A_MINUTE_S)

        pair.link.cut()
        await until(lambda: pair.link.connections)
        num_parts = pair.num_parts
        await fetch.ended
        await offer.ended

        assert num_parts == 1
        assert not pair.num_parts


async def test_home_asks_once_for_end_of_part_however_late_its_answer(
    fresh: Started,
) -> None:
    async with spread(fresh) as pair:
        offer, fetch = await pair.start_read(A_MINUTE_S)
        pair.other.signal(signal.SIGSTOP)
        await fetch.cancel()
        await anyio.sleep(ANSWERS_AFTER_S)
        pair.other.signal(signal.SIGCONT)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.freed

        assert pair.link.num_cancels == 1
        assert not pair.num_parts
        await offer.withdraw()
        await offer.ended


@LONG
async def test_leaving_engine_does_not_wait_for_killed_sibling(fresh: Started) -> None:
    async with spread(fresh, linked=False) as pair:
        _, fetch = await pair.start_read(PATIENT_S)
        pair.other.kill()
        failure = await failure_of(fetch)
        mapped = pair.home.memory_maps(pair.target.spec.engine_id)
    await until(pair.home.idle)
    await until(lambda: not pair.home.memory_maps(pair.target.spec.engine_id))

    assert mapped
    assert not failure.blocks_free


async def test_prefill_rank_leaving_after_read_fails_the_fetch(fresh: Started) -> None:
    block: dict[str, Any] = {"num_tokens": LARGE.block_size, "block_ids": {LARGE.name: [3]}}
    async with spread(fresh) as pair:
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
