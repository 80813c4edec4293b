"""What a home and an agent with remote ranks say to each other is lost, late or said again."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvbus.engine import DecodeSession, Fetch, Offer, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.chaos.links import PROXY_HOST
from tests.e2e.spread_engines import spread_engine
from tests.engines import Engine, Snapshot, engine, failure_of, make_spec, same, works
from tests.expected import expected_after
from tests.faults.conftest import Started
from tests.faults.losing_link import LosingLink, lossy

pytestmark = pytest.mark.anyio

NUM_TOKENS = 40
SHORT_S = 3.0
"""A deadline that passes while the link is held."""
DELAY_S = 0.6
"""Longer than a request waits before it is sent again."""


@dataclass
class Pair:
    """A prefill engine, a decode engine of two ranks at two agents, and the link between these."""

    source: Engine
    target: Engine
    link: LosingLink
    other: AgentProcess

    async def start(self, *, timeout_s: float | None = None) -> tuple[Offer, Fetch, Snapshot]:
        """A handoff, and what the decode engine has when it has completed."""
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

    def remote_rank_has(self, wanted: Snapshot) -> bool:
        return wanted[1].equal(self.target.snapshot()[1])


@asynccontextmanager
async def lossy_pair(fresh: Started) -> AsyncIterator[Pair]:
    """All of it, with its agents; one handoff was made."""
    prefill, home = fresh.prefill(), fresh.decode()
    other = fresh.decode(advertise_host=PROXY_HOST)
    fresh.start(prefill, home, other)
    async with (
        lossy(other, "delegate") as link,
        engine(PrefillSession, prefill.attach, make_spec(tp=2), seed=1) as source,
        spread_engine(DecodeSession, [home, other], make_spec(tp=2), seed=2) as target,
    ):
        assert await works(source, target)
        yield Pair(source, target, link, other)


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_a_delegate_that_was_lost_is_asked_again_and_done_once(fresh, lost):
    async with lossy_pair(fresh) as pair:
        pair.link.lose(requests=lost == "request")
        offer, fetch, wanted = await pair.start()
        await until(lambda: pair.link.num_lost)
        if lost == "answer":
            await until(lambda: pair.remote_rank_has(wanted))
        assert fetch.notice is None

        pair.link.restore()
        await fetch.completed()

        assert same(pair.target.snapshot(), wanted)
        assert await offer.released() is Outcome.COMPLETED
        assert await works(pair.source, pair.target)


async def test_a_delegate_whose_answer_is_slow_is_sent_again_and_done_once(fresh):
    async with lossy_pair(fresh) as pair:
        pair.link.delay(DELAY_S)
        offer, fetch, wanted = await pair.start()
        await fetch.completed()
        pair.link.heal()

        assert same(pair.target.snapshot(), wanted)
        assert await offer.released() is Outcome.COMPLETED
        pair.other.started["peer"] = pair.other.settings["peer_bind"]
        assert pair.other.metric("bus_repeats")
        assert not pair.other.logged("request.refused")


@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_blocks_are_withheld_until_the_other_agent_has_answered_however_late(fresh, lost):
    async with lossy_pair(fresh) as pair:
        pair.link.lose(requests=lost == "request")
        offer, fetch, wanted = await pair.start(timeout_s=SHORT_S)
        failure = await failure_of(fetch)
        has_landed = pair.remote_rank_has(wanted)
        withheld = not fetch.are_blocks_free

        pair.link.let_through()  # the request of a fetch that is over by now, and its end
        await fetch.blocks_freed()
        freed = pair.target.snapshot()
        await offer.withdraw()
        await offer.released()

        assert (failure.stage, failure.code) == ("reading", ErrorCode.TIMEOUT)
        assert withheld
        assert not failure.blocks_free
        assert has_landed == (lost == "answer")
        assert await works(pair.source, pair.target, before=freed), "nothing landed after that"
