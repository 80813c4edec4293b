"""A home loses sight of an agent that reads for it: the blocks come back when that writes no more.

Each rank's memory is watched: no byte may land in a block that the engine has back.
"""

import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.keys import Role
from kvbus.protocol import AbortDelegate, Delegate, to_body
from tests.agents import AgentProcess, until
from tests.chaos.links import PROXY_HOST
from tests.e2e.spread_engines import SpreadEngine, spread_engine
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    engine,
    failure_of,
    make_spec,
    start_long_read,
    works,
)
from tests.faults.conftest import SLOW_READS, Started
from tests.faults.losing_link import LosingLink, lossy
from tests.keyring import KeyRing
from tests.plain_sockets import ask
from tests.vectors.examples import ROOMS

pytestmark = pytest.mark.anyio

A_MINUTE_S = 60.0
TIMEOUT_S = 3.0
QUARANTINE_S = 2.0
LATE_S = 30.0
"""How late a request may come, as a home supposes (`remote_ranks.LATE_S`)."""


@dataclass
class Spread:
    """A prefill engine, and a decode engine of two ranks at two agents: ``home`` and ``other``."""

    source: Engine
    target: SpreadEngine
    home: AgentProcess
    other: AgentProcess

    @property
    def num_delegated(self) -> int:
        return int(self.other.status()["counts"]["delegated_reads"])

    async def start_read(self, *, timeout_s: float | None = None) -> tuple[Offer, Fetch]:
        """A handoff that takes long, once the other agent reads for it."""
        offer, fetch = await start_long_read(self.source, self.target, timeout_s=timeout_s)
        await until(lambda: self.num_delegated)
        return offer, fetch


@asynccontextmanager
async def spread(
    prefill: AgentProcess, home: AgentProcess, other: AgentProcess
) -> AsyncIterator[Spread]:
    """All of it; the agents run."""
    spec = [make_spec(tp=2, groups=(LARGE,)) for _ in range(2)]
    shape = {"num_blocks": NUM_LARGE_BLOCKS}
    async with (
        engine(PrefillSession, prefill.attach, spec[0], seed=1, **shape) as source,
        spread_engine(DecodeSession, [home, other], spec[1], seed=2, **shape) as target,
    ):
        yield Spread(source, target, home, other)


@dataclass
class Doubt:
    """What may come between a home and the agent that reads for it."""

    link: LosingLink
    folders: dict[str, Path]
    keys: Path

    def distrust(self, who: str, whom: str) -> Callable[[], object]:
        """One takes the other's key for none; returns what undoes it."""
        trusted = self.folders[who] / f"{whom}.toml"
        trusted.unlink()
        return lambda: shutil.copy(self.keys / f"{whom}.toml", trusted)

    def hang_up(self) -> Callable[[], object]:
        """Each connection is ended within its handshake."""
        self.link.take_down()
        return self.link.heal


BREAKS: dict[str, Callable[[Doubt], Callable[[], object]]] = {
    "the other agent distrusts the home": lambda doubt: doubt.distrust("other", "home"),
    "the home distrusts the other agent": lambda doubt: doubt.distrust("home", "other"),
    "the other agent hangs up": Doubt.hang_up,
}


@pytest.mark.parametrize("broken", BREAKS)
async def test_blocks_are_withheld_until_an_agent_that_was_out_of_reach_says_that_it_has_ended(
    fresh: Started, tmp_path: Path, broken: str
) -> None:
    ring = KeyRing(tmp_path)
    home = ring.prepare(fresh, Role.DECODE, "home", **SLOW_READS)
    other = ring.prepare(fresh, Role.DECODE, "other", advertise_host=PROXY_HOST, **SLOW_READS)
    prefill = ring.prepare(fresh, Role.PREFILL, "prefill", **SLOW_READS)
    folders = {name: tmp_path / name for name in ("home", "other")}
    for agent, folder in zip((home, other), folders.values(), strict=True):
        shutil.copytree(ring.trusted, folder)
        agent.settings["authorized_keys"] = str(folder)
    fresh.start(prefill, home, other)

    async with lossy(other, "delegate") as link, spread(prefill, home, other) as pair:
        other.started["peer"] = other.settings["peer_bind"]  # looked at without the link
        offer, fetch = await pair.start_read()

        undo = BREAKS[broken](Doubt(link, folders, ring.trusted))
        failure = await failure_of(fetch)
        undo()
        await fetch.blocks_freed()
        still_read = pair.num_delegated
        await until(lambda: not pair.num_delegated)
        await offer.withdraw()
        await offer.released()

        assert not failure.blocks_free
        assert not still_read
        assert await works(pair.source, pair.target)
        pair.target.decode.check_free_blocks()  # type: ignore[attr-defined]


async def test_blocks_are_back_within_a_minute_when_the_other_agent_was_killed_for_good(
    fresh: Started,
) -> None:
    prefill, home, other = (
        make(**SLOW_READS) for make in (fresh.prefill, fresh.decode, fresh.decode)
    )
    fresh.start(prefill, home, other)
    async with spread(prefill, home, other) as pair:
        offer, fetch = await pair.start_read()

        other.kill()
        failure = await failure_of(fetch)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()

        assert (failure.code, failure.blocks_free) == (ErrorCode.PEER_LOST, False)


async def test_blocks_are_back_at_once_when_the_other_agent_was_never_asked(
    fresh: Started,
) -> None:
    prefill, home, other = fresh.prefill(), fresh.decode(), fresh.decode()
    fresh.start(prefill, home, other)
    async with spread(prefill, home, other) as pair:
        other.kill()
        offer = await pair.source.prefill.offer("r", num_tokens=64, block_ids={"full": [3]})
        fetch = pair.target.decode.fetch(
            offer.ticket, num_tokens=64, block_ids={"full": [5]}, timeout_s=TIMEOUT_S
        )
        failure = await failure_of(fetch)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.blocks_freed()
        await offer.withdraw()
        await offer.released()

        assert failure.code is ErrorCode.TIMEOUT


@pytest.mark.parametrize("is_stopped", [False, True], ids=["cut off", "stopped"])
async def test_the_time_after_which_an_agent_must_have_ended_counts_only_while_it_is_cut_off(
    fresh: Started, is_stopped: bool
) -> None:
    """One that is stopped keeps its connection, and writes on when it continues."""
    short = {"quarantine_timeout_s": QUARANTINE_S}
    prefill, home = fresh.prefill(**SLOW_READS), fresh.decode(**SLOW_READS, **short)
    other = fresh.decode(advertise_host=PROXY_HOST, **SLOW_READS, **short)
    fresh.start(prefill, home, other)
    async with lossy(other, "delegate") as link, spread(prefill, home, other) as pair:
        other.started["peer"] = other.settings["peer_bind"]
        offer, fetch = await pair.start_read(timeout_s=TIMEOUT_S)

        if is_stopped:
            other.signal(signal.SIGSTOP)
        else:
            link.take_down()
        failure = await failure_of(fetch)
        ended_at = time.monotonic() + LATE_S + TIMEOUT_S + QUARANTINE_S
        if is_stopped:
            await until(lambda: time.monotonic() > ended_at + TIMEOUT_S, within_s=A_MINUTE_S)
            assert not fetch.are_blocks_free
            other.signal(signal.SIGCONT)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.blocks_freed()
        link.heal()
        await until(lambda: not pair.num_delegated)
        await offer.withdraw()
        await offer.released()

        assert (failure.code, failure.blocks_free) == (ErrorCode.TIMEOUT, False)
        assert await works(pair.source, pair.target)
        pair.target.decode.check_free_blocks()  # type: ignore[attr-defined]


def test_a_delegate_that_comes_after_its_abort_is_refused(decode: AgentProcess) -> None:
    asked = ROOMS["peer"][Delegate][0]
    assert isinstance(asked, Delegate)
    abort = AbortDelegate(fetch_id=asked.fetch_id, access=asked.access, token=asked.token)

    before = ask(decode.peer, "delegate", to_body(asked))
    aborted = ask(decode.peer, "abort_delegate", to_body(abort))
    after = ask(decode.peer, "delegate", to_body(asked))

    assert before["error"]["code"] == "engine_unknown"
    assert aborted["ok"] == {"ended": True}
    assert after["error"]["code"] == "cancelled"
