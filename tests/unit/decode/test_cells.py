"""A fetch commits an offer by its cell only with its bytes, whichever process dies or stops.

The prefill agent is a process, and the prefill engine a thread. Both run while the decode agent, in
the event loop of the test, is held up. The engine overwrites its blocks when an offer ends.
"""

import mmap
import signal
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import anyio
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvbus import protocol
from kvbus.engine import Fetch, Link, Offer, OfferOptions, RankMemory
from kvbus.errors import ErrorCode, FetchFailed, RequestTimeout
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import Commit, CommitCell, Outcome, Request
from kvbus_decode import config
from kvbus_decode.remote_agent import Peer
from tests.support import plain_sockets
from tests.support.agents import AgentProcess, Agents, until, wait_until
from tests.support.engines import NUM_BLOCKS, Engine, engine, failure_of, make_spec
from tests.support.memories import NHD
from tests.unit.decode.neighbours import before_each_copy, decode_agent
from tests.unit.prefill.inside import given_back

pytestmark = pytest.mark.anyio

BLOCKS = {"full": [3, 1]}
INTO, NUM_TOKENS = (5, 2), 32
GOOD, POISON = 0x11, 0xEE
WITHIN_S = 60.0
GONE = {ErrorCode.PEER_LOST, ErrorCode.STALE, ErrorCode.TRANSFER_FAILED, ErrorCode.PEER_UNREACHABLE}
GIVES_UP_S = 3.0


@dataclass
class Site:
    """A prefill agent, its engine by its link and all of its bytes, and a decode engine."""

    prefill: AgentProcess
    link: Link
    cache: npt.NDArray[np.uint8]
    target: Engine
    num_offers: int = 0

    async def offer(self, ttl_s: float = 60.0, *, readers: int = 1) -> Offer:
        """Make an offer; with several readers it has no cell."""
        return await self.ask_for_offer(ttl_s=ttl_s, readers=readers)

    def ask_for_offer(self, **options: Unpack[OfferOptions]) -> Offer:
        self.cache.fill(GOOD)
        self.num_offers += 1
        name = f"r{self.num_offers}"
        offer = self.link.offer(name, num_tokens=NUM_TOKENS, block_ids=BLOCKS, **options)
        offer.ended.then(lambda: self.cache.fill(POISON))
        return offer

    def fetch(self, offer: Offer, blocks: tuple[int, ...] = INTO, **options: Any) -> Fetch:
        return self.fetch_by(offer.ticket, blocks, **options)

    def fetch_by(self, ticket: Any, blocks: tuple[int, ...] = INTO, **options: Any) -> Fetch:
        for view in self.target.views().values():
            view[[*blocks]] = 0
        wanted = {"num_tokens": NUM_TOKENS, "block_ids": {"full": blocks}, **options}
        fetch: Fetch = self.target.decode.fetch(ticket, **wanted)
        return fetch

    def has_all(self, blocks: tuple[int, ...] = INTO) -> bool:
        views = [view[[*blocks]].contiguous() for view in self.target.views().values()]
        return all(bool((view.view(torch.uint8) == GOOD).all()) for view in views)

    async def works(self) -> bool:
        """Whether a handoff completes, by its cell or not; afterwards its route is known."""
        offer = await self.offer()
        await self.fetch(offer).ended
        is_completed = self.has_all() and await offer.ended is Outcome.COMPLETED
        # The callback of this end writes in another thread, and the next offer fills the cache.
        await until(lambda: bool((self.cache == POISON).all()))
        return is_completed


@pytest.fixture
async def site(folder: Path, fresh: Agents, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    (folder / "d").mkdir(mode=0o700)
    # a read that is held up asks for a lease, after which cells mean nothing
    patient = partial(vars(config)["FetchLimits"], acquire_after_s=WITHIN_S)
    monkeypatch.setattr(config, "FetchLimits", patient)
    prefill, spec = fresh.prepare("prefill"), make_spec()
    fresh.start(prefill)
    memory = RankMemory.allocate(spec, 0, NHD, num_blocks=NUM_BLOCKS)
    segment = memory.storages["kv"]
    assert isinstance(segment, SharedSegment)
    # a mapping of its own, which does not end with the link
    cache = np.frombuffer(mmap.mmap(segment.fd, segment.size_bytes), np.uint8)
    async with decode_agent(folder / "d") as decode:
        async with engine(decode.config.attach_path, make_spec()) as target:
            link = Link(prefill.attach, spec, memory=memory, request_timeout_s=GIVES_UP_S)
            await anyio.to_thread.run_sync(link.__enter__)
            try:
                site = Site(prefill, link, cache, target)
                assert await site.works()
                yield site
            finally:
                await anyio.to_thread.run_sync(link.close)
            engines = decode.agent.engines.engines.values()
            processes = [process for one in engines for process in one.processes]
        await until(lambda: all(map(given_back, processes)))


async def code_of(fetch: Fetch) -> str:
    """Why it failed; empty when it completed."""
    try:
        await fetch.ended
    except FetchFailed as failure:
        return failure.code
    return ""


Happens = Callable[[Site, Offer], None]


def wait_poisoned(site: Site) -> None:
    wait_until(lambda: bool((site.cache == POISON).all()), "the blocks are written over")


def kill(site: Site, offer: Offer) -> None:
    site.prefill.kill()
    withdraw(site, offer)


def withdraw(site: Site, offer: Offer) -> None:
    offer.withdraw()
    wait_poisoned(site)


def leave_a_stopped_agent(site: Site, _: Offer) -> None:
    site.prefill.signal(signal.SIGSTOP)
    site.link.close()
    wait_poisoned(site)


async def test_offer_committed_before_crash_is_not_offered_again(site: Site) -> None:
    """The stopped agent could not report the commit; the engine notifies the next one."""
    offer = await site.offer()
    right = {"offer_id": offer.offer_id, "secret": offer.ticket["secret"]}
    site.prefill.signal(signal.SIGSTOP)
    await site.fetch(offer).ended
    has_all, had_ended = site.has_all(), offer.ended.done()
    site.prefill.kill()
    ended = await offer.ended
    await anyio.to_thread.run_sync(site.prefill.start)
    await until(lambda: site.link.num_opened == 2 and site.link.is_open)
    boot = plain_sockets.ask(site.prefill.peer, "status", {})["boot"]
    acquire = {"agent_boot": boot, "reader_id": "another", "lease_s": 1.0, **right}
    refused = plain_sockets.ask(site.prefill.peer, "acquire", acquire)["error"]
    assert has_all
    assert not had_ended
    assert ended is Outcome.COMPLETED
    assert refused["code"] == ErrorCode.OFFER_COMPLETED
    assert await site.works()


MOMENTS = ("before the copy", "before the commit", "after the commit")
EVENTS = {"killed": kill, "withdrawn": withdraw, "left while it is stopped": leave_a_stopped_agent}


def hold_up(patch: pytest.MonkeyPatch, moment: str, happens: Callable[[], None]) -> list[bool]:
    """Have it happen in the event loop of the decode agent; whether cells were committed."""
    commits: list[bool] = []

    class Watched(CommitCell):
        def commit(self, token: str) -> bool:
            if moment == "before the commit":
                happens()
            commits.append(super().commit(token))
            if moment == "after the commit":
                happens()
            return commits[-1]

    patch.setattr("kvbus_decode.lease_client.CommitCell", Watched)
    if moment == "before the copy":
        before_each_copy(patch, happens)
    return commits


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("happens", EVENTS.values(), ids=EVENTS)
async def test_offer_that_its_engine_ends_is_committed_before_or_never(
    site: Site, monkeypatch: pytest.MonkeyPatch, moment: str, happens: Happens
) -> None:
    offer = await site.offer()
    is_before, is_stopped = moment != "after the commit", happens is leave_a_stopped_agent
    with monkeypatch.context() as patch:
        commits = hold_up(patch, moment, lambda: happens(site, offer))
        # an agent that is killed is waited for until the deadline
        timeout_s = GIVES_UP_S if happens is kill and is_before else None
        fetch = site.fetch(offer, timeout_s=timeout_s)
        if is_stopped and is_before:
            await until(lambda: commits)
            site.prefill.signal(signal.SIGCONT)
        code = await code_of(fetch)
    if is_stopped and not is_before:
        site.prefill.signal(signal.SIGCONT)
    assert commits == [not is_before]
    if is_before:
        ended = {ErrorCode.OFFER_WITHDRAWN, ErrorCode.ENGINE_LOST}
        assert code in ({*GONE, ErrorCode.TIMEOUT} if happens is kill else ended)
    else:
        assert code == ""
        assert site.has_all()
        assert happens is not withdraw or await offer.ended is Outcome.COMPLETED


async def test_abandoned_agent_refuses_commit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It resumes when the engine has overwritten the blocks, while the link closes."""
    asked, is_over = list[Commit](), threading.Event()

    def note(peer: Peer, message: Request[Any], *rest: Any) -> None:
        ask(peer, message, *rest)
        if isinstance(message, Commit):
            asked.append(message)

    def go_on() -> None:
        site.prefill.signal(signal.SIGCONT)
        is_over.wait(WITHIN_S)

    ask = Peer.request
    offer = await site.offer(readers=2)
    offer.ended.then(go_on)
    with monkeypatch.context() as patch:
        before_each_copy(patch, lambda: site.prefill.signal(signal.SIGSTOP))
        patch.setattr(Peer, "request", note)
        fetch = site.fetch(offer)
        await until(lambda: asked)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(site.link.aclose)
            failure = await failure_of(fetch)
            is_over.set()
    assert failure.code is ErrorCode.ENGINE_LOST
    assert bool((site.cache == POISON).all())


@pytest.mark.parametrize("readers", [1, 2])
async def test_offer_at_stopped_agent_keeps_blocks_until_answered(site: Site, readers: int) -> None:
    name = protocol.Rendezvous(transfer_id="of-one-request-1", endpoint=site.prefill.peer)
    site.prefill.signal(signal.SIGSTOP)
    offer = site.ask_for_offer(transfer_id=name.transfer_id, readers=readers)
    with pytest.raises(RequestTimeout):
        await offer
    site.prefill.signal(signal.SIGCONT)
    code: str = ErrorCode.PEER_UNREACHABLE
    while code == ErrorCode.PEER_UNREACHABLE:
        code = await code_of(site.fetch_by(name.to_json()))
    assert code == ErrorCode.OFFER_WITHDRAWN or (code == "" and site.has_all())
    assert await offer.ended in {Outcome.COMPLETED, Outcome.WITHDRAWN}
    assert await site.works()


async def test_commits_are_reported_in_few_bounded_messages(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, ask = list[int](), Peer.request

    def note(peer: Peer, message: Request[Any], *rest: Any) -> None:
        ask(peer, message, *rest)
        if isinstance(message, protocol.ReportCommits):
            told.append(len(message.tokens))

    monkeypatch.setattr(Peer, "request", note)
    monkeypatch.setattr("kvbus_decode.lease_client.MAX_COMMITS", 2)
    offers = [await site.offer() for _ in range(16)]
    fetches = [site.fetch(offer) for offer in offers]
    assert {(await fetch.ended).outcome for fetch in fetches} == {Outcome.COMPLETED}
    assert {await offer.ended for offer in offers} == {Outcome.COMPLETED}
    assert sum(told) == 16
    assert max(told) <= 2
    assert len(told) < 16


async def test_one_of_many_fetches_commits_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = hold_up(monkeypatch, "", lambda: None)
    offer = await site.offer()
    places = [(2 * at, 2 * at + 1) for at in range(3)]
    codes = [await code_of(one) for one in [site.fetch(offer, blocks) for blocks in places]]
    assert sorted(codes) == ["", *2 * [ErrorCode.OFFER_COMPLETED]]
    assert commits.count(True) == 1
    assert site.has_all(places[codes.index("")])
