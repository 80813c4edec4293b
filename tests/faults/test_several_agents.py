"""An engine at several agents: these lose sight of each other, or end, while one reads for another.

Its blocks come back when none of the agents writes any more. Each rank's memory is watched: no byte
may land in a block that the engine has back.
"""

import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed, PeerLost
from kvbus.geometry import GroupSpec
from kvbus.keys import Role
from kvbus.protocol import AbortDelegate, Delegate, Outcome, to_body
from tests.agents import AgentProcess, until
from tests.chaos.links import PROXY_HOST
from tests.engines import (
    FULL,
    LARGE,
    NUM_LARGE_BLOCKS,
    Engine,
    Snapshot,
    engine,
    failure_of,
    make_spec,
    same,
    start_long_read,
    works,
)
from tests.expected import expected_after
from tests.faults.conftest import SLOW_READS, Started
from tests.faults.losing_link import LosingLink, lossy
from tests.keyring import KeyRing
from tests.plain_sockets import ask
from tests.process.spread_engines import SpreadEngine, spread_engine
from tests.process.tap import TAPPED, tapped
from tests.vectors.examples import ROOMS

pytestmark = pytest.mark.anyio

LONG = pytest.mark.long
A_MINUTE_S = 60.0
TIMEOUT_S = 3.0
QUARANTINE_S = 2.0
LATE_S = 30.0
"""How late a request may come, as a home supposes (`remote_ranks.LATE_S`)."""
GRACE_S = 0.5
"""Not later than a fetch that has asked for its yes may end (`confirm_grace_s`)."""
DELAY_S = 0.6
"""Longer than a request waits before it is sent again."""
NUM_TOKENS = 40
ONE_BLOCK: dict[str, Any] = {"num_tokens": 64, "block_ids": {LARGE.name: [5]}}
ONE_POST: dict[str, Any] = {"slice_bytes": 64 << 20, "slice_descriptors": 1 << 16}
NOT_VALID = (
    ErrorCode.STALE,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.ENGINE_UNKNOWN,
    ErrorCode.ENGINE_LOST,
)


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

    async def start(self, *, timeout_s: float | None = None) -> tuple[Offer, Fetch, Snapshot]:
        """A short handoff, and what the decode engine has when it has completed."""
        source, target = self.source, self.target
        theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
        blocks = source, theirs, target, ours
        wanted = expected_after(target.snapshot(), *blocks, num_tokens=NUM_TOKENS)
        offer = await source.prefill.offer(
            uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs
        )
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=timeout_s
        )
        return offer, fetch, wanted

    async def read_all_but_the_seal(self, *, timeout_s: float | None = None) -> tuple[Offer, Fetch]:
        """A handoff of one block that both agents have read; it is not sealed yet."""
        source, target = self.source, self.target
        offer = await source.prefill.offer(
            "r", num_tokens=64, block_ids={LARGE.name: [3]}, sealed=False
        )
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=timeout_s)
        await until(lambda: target.views()[1, 0, "v"][5].equal(source.views()[1, 0, "v"][3]))
        await until(lambda: not self.num_delegated)
        return offer, fetch

    def remote_rank_has(self, wanted: Snapshot) -> bool:
        return wanted[1].equal(self.target.snapshot()[1])


async def end(offer: Offer) -> None:
    await offer.withdraw()
    await offer.released()


@asynccontextmanager
async def spread(
    prefill: Sequence[AgentProcess],
    home: AgentProcess,
    other: AgentProcess,
    *,
    group: GroupSpec = LARGE,
    num_blocks: int = NUM_LARGE_BLOCKS,
) -> AsyncIterator[Spread]:
    """All of it; the agents run. The prefill engine is at one agent, or at two as well."""
    specs = [make_spec(tp=2, groups=(group,)) for _ in range(2)]
    source_of: AbstractAsyncContextManager[Engine]
    if len(prefill) > 1:
        source_of = spread_engine(PrefillSession, prefill, specs[0], num_blocks=num_blocks, seed=1)
    else:
        source_of = engine(
            PrefillSession, prefill[0].attach, specs[0], num_blocks=num_blocks, seed=1
        )
    async with (
        source_of as source,
        spread_engine(
            DecodeSession, [home, other], specs[1], num_blocks=num_blocks, seed=2
        ) as target,
    ):
        yield Spread(source, target, home, other)


def slow(
    fresh: Started, num_prefill: int = 1, **decode: Any
) -> tuple[list[AgentProcess], AgentProcess, AgentProcess]:
    """Agents that read slowly."""
    prefill = [fresh.prefill(**SLOW_READS) for _ in range(num_prefill)]
    home, other = (fresh.decode(**SLOW_READS, path="direct", **decode) for _ in range(2))
    fresh.start(*prefill, home, other)
    return prefill, home, other


async def test_a_prefill_rank_that_leaves_after_the_read_fails_the_fetch(fresh: Started) -> None:
    prefill, *decode = slow(fresh, num_prefill=2)
    async with spread(prefill, *decode) as pair:
        before = pair.target.snapshot()
        offer, fetch = await pair.read_all_but_the_seal()

        assert isinstance(pair.source, SpreadEngine)
        await pair.source.lose(1)
        await until(lambda: not prefill[1].memory_maps(pair.source.spec.engine_id))
        await offer.seal()
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert not same(pair.target.snapshot(), before)
        assert failure.code in NOT_VALID
        assert failure.blocks_free


@LONG
async def test_an_offer_is_left_alone_when_another_agent_of_its_engine_answers_after_the_deadline(
    fresh: Started,
) -> None:
    prefill, *decode = slow(fresh, num_prefill=2)
    async with spread(prefill, *decode) as pair:
        offer, fetch = await pair.read_all_but_the_seal(timeout_s=2 * TIMEOUT_S)
        overdue_at = time.monotonic() + 2 * TIMEOUT_S

        prefill[1].signal(signal.SIGSTOP)
        await offer.seal()
        await until(lambda: time.monotonic() > overdue_at + GRACE_S)
        prefill[1].signal(signal.SIGCONT)
        failure = await failure_of(fetch)
        await offer.withdraw()

        assert (failure.stage, failure.code) == ("confirming", ErrorCode.TIMEOUT)
        assert await offer.released() is Outcome.WITHDRAWN


@LONG
async def test_an_engine_that_leaves_does_not_wait_for_a_killed_sibling(fresh: Started) -> None:
    prefill, home, other = slow(fresh)
    async with spread(prefill, home, other) as pair:
        _, fetch = await pair.start_read(timeout_s=12.0)
        other.kill()
        failure = await failure_of(fetch)
        mapped = home.memory_maps(pair.target.spec.engine_id)
    await until(home.idle)
    await until(lambda: not home.memory_maps(pair.target.spec.engine_id))

    assert mapped
    assert not failure.blocks_free


@LONG
async def test_a_sibling_of_a_killed_home_stops_by_the_deadline(fresh: Started) -> None:
    prefill, home, other = slow(fresh, num_prefill=2)
    async with spread(prefill, home, other) as pair:
        offer, fetch = await pair.start_read(timeout_s=TIMEOUT_S)
        await until(lambda: other.logged("handshake.done", reader=pair.target.spec.engine_id))
        overdue_at = time.monotonic() + TIMEOUT_S  # of the sibling, or later

        prefill[1].signal(signal.SIGSTOP)
        home.kill()
        failure = await failure_of(fetch)
        with pytest.raises(PeerLost):
            await fetch.blocks_freed()
        await until(lambda: time.monotonic() > overdue_at)
        prefill[1].signal(signal.SIGCONT)
        await until(other.idle)
        await end(offer)

        assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
        assert not failure.blocks_free
        assert other.says("request.refused", op="delegate", code="timeout")


@LONG
async def test_a_sibling_that_comes_back_late_when_its_home_is_gone_has_its_read_served(
    fresh: Started,
) -> None:
    one_post = {"env": {"UCX_TLS": "tcp"}, "transport": ONE_POST}
    prefill = [fresh.prefill(**one_post) for _ in range(2)]
    home, other = (fresh.decode(**one_post, path="direct") for _ in range(2))
    fresh.start(*prefill, home, other)
    async with spread(prefill, home, other) as pair:
        while True:
            _, fetch = await start_long_read(pair.source, pair.target, timeout_s=20.0)
            await until(
                lambda: other.metric("outstanding_bytes") or not home.status()["counts"]["fetches"]
            )
            other.signal(signal.SIGSTOP)
            if home.status()["counts"]["fetches"]:
                break
            other.signal(signal.SIGCONT)  # it had ended already
            await fetch.completed()
        home.kill()  # which would ask for the source to be driven
        await failure_of(fetch)
        await until(lambda: not any(agent.metric("progress_tokens") for agent in prefill))

        other.signal(signal.SIGCONT)
        await until(other.idle)

        assert not other.metric("recycled_transports")


@LONG
async def test_ranks_at_another_agent_come_back_from_a_read_that_never_ends(
    fresh: Started,
) -> None:
    prefill, *decode = slow(fresh, num_prefill=2, quarantine_timeout_s=QUARANTINE_S)
    async with spread(prefill, *decode) as pair:
        offer, fetch = await pair.start_read(timeout_s=6.0)
        await until(lambda: pair.other.metric("outstanding_handles"))

        prefill[1].signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        recycled = pair.other.metric("recycled_transports")
        freed = pair.target.snapshot()
        prefill[1].signal(signal.SIGCONT)
        await end(offer)

        assert not failure.blocks_free
        assert recycled == 1
        assert await works(pair.source, pair.target, before=freed)


@asynccontextmanager
async def lossy_pair(fresh: Started) -> AsyncIterator[tuple[Spread, LosingLink]]:
    """A link between the two decode agents; one handoff was made."""
    prefill, home = fresh.prefill(), fresh.decode()
    other = fresh.decode(advertise_host=PROXY_HOST)
    fresh.start(prefill, home, other)
    async with (
        lossy(other, "delegate") as link,
        spread([prefill], home, other, group=FULL, num_blocks=64) as pair,
    ):
        other.started["peer"] = other.settings["peer_bind"]  # looked at without the link
        assert await works(pair.source, pair.target)
        yield pair, link


@pytest.mark.parametrize("lost", [pytest.param("request", marks=LONG), "answer"])
async def test_a_delegate_that_was_lost_is_asked_again_and_done_once(
    fresh: Started, lost: str
) -> None:
    async with lossy_pair(fresh) as (pair, link):
        link.lose(requests=lost == "request")
        offer, fetch, wanted = await pair.start()
        await until(lambda: link.num_lost)
        if lost == "answer":
            await until(lambda: pair.remote_rank_has(wanted))
        assert fetch.notice is None

        link.restore()
        await fetch.completed()

        assert same(pair.target.snapshot(), wanted)
        assert await offer.released() is Outcome.COMPLETED
        assert await works(pair.source, pair.target)


@LONG
async def test_a_delegate_whose_answer_is_slow_is_sent_again_and_done_once(fresh: Started) -> None:
    async with lossy_pair(fresh) as (pair, link):
        link.delay(DELAY_S)
        offer, fetch, wanted = await pair.start()
        await fetch.completed()
        link.heal()

        assert same(pair.target.snapshot(), wanted)
        assert await offer.released() is Outcome.COMPLETED
        assert pair.other.metric("bus_repeats")
        assert not pair.other.logged("request.refused")


@LONG
@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_blocks_are_withheld_until_the_other_agent_has_answered_however_late(
    fresh: Started, lost: str
) -> None:
    async with lossy_pair(fresh) as (pair, link):
        link.lose(requests=lost == "request")
        offer, fetch, wanted = await pair.start(timeout_s=TIMEOUT_S)
        failure = await failure_of(fetch)
        has_landed = pair.remote_rank_has(wanted)
        withheld = not fetch.are_blocks_free

        link.let_through()  # the request of a fetch that is over by now, and its end
        await fetch.blocks_freed()
        freed = pair.target.snapshot()
        await end(offer)

        assert (failure.stage, failure.code) == ("reading", ErrorCode.TIMEOUT)
        assert withheld
        assert not failure.blocks_free
        assert has_landed == (lost == "answer")
        assert await works(pair.source, pair.target, before=freed), "nothing landed after that"


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


@pytest.mark.parametrize(
    "broken", [pytest.param(name, marks=LONG if at else ()) for at, name in enumerate(BREAKS)]
)
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
    async with lossy(other, "delegate") as link, spread([prefill], home, other) as pair:
        other.started["peer"] = other.settings["peer_bind"]
        offer, fetch = await pair.start_read()

        undo = BREAKS[broken](Doubt(link, folders, ring.trusted))
        failure = await failure_of(fetch)
        undo()
        await fetch.blocks_freed()
        still_read = pair.num_delegated
        await until(lambda: not pair.num_delegated)
        await end(offer)

        assert not failure.blocks_free
        assert not still_read
        assert await works(pair.source, pair.target)


@LONG
async def test_blocks_are_back_within_a_minute_when_the_other_agent_was_killed_for_good(
    fresh: Started,
) -> None:
    prefill, home, other = slow(fresh)
    async with spread(prefill, home, other) as pair:
        offer, fetch = await pair.start_read()

        other.kill()
        failure = await failure_of(fetch)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.blocks_freed()
        await end(offer)

        assert (failure.code, failure.blocks_free) == (ErrorCode.PEER_LOST, False)


@LONG
async def test_blocks_are_back_at_once_when_the_other_agent_was_never_asked(
    fresh: Started,
) -> None:
    prefill, home, other = slow(fresh)
    async with spread(prefill, home, other) as pair:
        other.kill()
        offer = await pair.source.prefill.offer("r", num_tokens=64, block_ids={LARGE.name: [3]})
        fetch = pair.target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=TIMEOUT_S)
        failure = await failure_of(fetch)
        with anyio.fail_after(A_MINUTE_S):
            await fetch.blocks_freed()
        await end(offer)

        assert failure.code is ErrorCode.TIMEOUT


@LONG
@pytest.mark.parametrize("is_stopped", [False, True], ids=["cut off", "stopped"])
async def test_the_time_after_which_an_agent_must_have_ended_counts_only_while_it_is_cut_off(
    fresh: Started, is_stopped: bool
) -> None:
    """One that is stopped keeps its connection, and writes on when it continues."""
    short = {"quarantine_timeout_s": QUARANTINE_S}
    prefill, home = fresh.prefill(**SLOW_READS), fresh.decode(**SLOW_READS, **short)
    other = fresh.decode(advertise_host=PROXY_HOST, **SLOW_READS, **short)
    fresh.start(prefill, home, other)
    async with lossy(other, "delegate") as link, spread([prefill], home, other) as pair:
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
        await end(offer)

        assert (failure.code, failure.blocks_free) == (ErrorCode.TIMEOUT, False)
        assert await works(pair.source, pair.target)


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


async def test_a_home_that_compares_takes_no_word_for_bytes_of_an_agent_that_makes_no_digests(
    fresh: Started,
) -> None:
    """As an agent of before digests answers, it says nothing of what was compared."""
    prefill, home = fresh.prefill(), fresh.decode(digest="full")
    older = fresh.decode(**TAPPED)
    with tapped(older) as tap:
        fresh.start(prefill, home, older)
        tap.change("delegate", lambda said: said.pop("one_in"))
        async with spread([prefill], home, older, group=FULL, num_blocks=64) as pair:
            with pytest.raises(FetchFailed) as failed:
                await works(pair.source, pair.target)
        told, older.started["peer"] = older.peer, older.settings["peer_bind"]

    assert failed.value.code is ErrorCode.INCOMPATIBLE
    assert f"decode agent at {told} makes no digests" in failed.value.message
    assert "run a newer kvbus there" in failed.value.message


async def test_an_agent_reads_for_two_engines_with_equal_fetch_ids(fresh: Started) -> None:
    prefill, *decode = fresh.prefill(), fresh.decode(), fresh.decode()
    fresh.start(prefill, *decode)
    blocks: dict[str, Any] = {"num_tokens": 16, "block_ids": {FULL.name: [3]}}
    async with (
        engine(PrefillSession, prefill.attach, make_spec(tp=2), seed=1) as source,
        spread_engine(DecodeSession, decode, make_spec(tp=2), seed=2) as one,
        spread_engine(DecodeSession, decode, make_spec(tp=2), seed=3) as other,
    ):
        offers = [await source.prefill.offer(name, **blocks) for name in ("r", "s")]
        fetches = [
            target.decode.fetch(offer.ticket, **blocks, fetch_id="fetch-1")
            for target, offer in zip((one, other), offers, strict=True)
        ]
        for fetch in fetches:
            await fetch.completed()
        for offer in offers:
            await offer.released()
        story = "\n".join(decode[1].status(fetch_id="fetch-1")["story"])

    assert story.count("ChunkEnded") == len(fetches)
