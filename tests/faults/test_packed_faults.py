"""Staging that is used up, too small or not there: others go on, and who needs it is told."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    engine,
    failure_of,
    make_spec,
    pair,
    same,
    works,
)
from tests.faults.conftest import DECODE, PREFILL, SLOW_READS, Started

pytestmark = pytest.mark.anyio

LONG: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
RING: dict[str, Any] = {"staging_bytes": 4 << 18, "slot_bytes": 1 << 18}
NO_ANSWER = (ErrorCode.LEASE_EXPIRED, ErrorCode.TIMEOUT)


class Site:
    """A slow prefill agent, another one, and a decode agent with a small ring."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.prefill, self.other = (
            agents.prepare("prefill", **SLOW_READS, **PREFILL, **RING) for _ in range(2)
        )
        self.decode: AgentProcess = agents.prepare(
            "decode", **SLOW_READS, **DECODE, **RING, path="packed"
        )


@pytest.fixture(scope="module")
def shared_site() -> Iterator[Site]:
    """The agents of this file, ended with its last test."""
    with agents_ended(Agents) as agents:
        site = Site(agents)
        agents.start(site.prefill, site.decode)
        agents.start(site.other)
        yield site


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The agents, which must hold nothing after each test; one that was killed is restarted."""
    yield shared_site
    shared_site.agents.check()
    for agent in shared_site.agents.all:
        if not agent.alive:
            agent.start()


def slots(agent: AgentProcess) -> int:
    """Staging slots in use."""
    return int(agent.status()["counts"]["slots"])


async def test_many_fetches_from_a_stopped_prefill_agent_leave_slots_for_others(site: Site) -> None:
    async with (
        pair(site.prefill.attach, site.decode.attach, **LONG) as (source, target),
        engine(
            PrefillSession,
            site.other.attach,
            make_spec(groups=(LARGE,)),
            num_blocks=NUM_LARGE_BLOCKS,
            seed=5,
        ) as healthy,
    ):
        blocks = source.some_blocks(5, 64 * 512)["full"], target.some_blocks(6, 64 * 512)["full"]
        offers, fetches = [], []
        for number in range(4):
            part = slice(100 * number, 100 * (number + 1))
            offers.append(
                await source.prefill.offer(
                    f"r{number}", num_tokens=6400, block_ids={"full": blocks[0][part]}
                )
            )
            fetches.append(
                target.decode.fetch(
                    offers[-1].ticket, num_tokens=6400, block_ids={"full": blocks[1][part]}
                )
            )
        await until(lambda: slots(site.decode) and slots(site.prefill))

        site.prefill.signal(signal.SIGSTOP)
        failures = [await failure_of(fetch) for fetch in fetches]
        meanwhile = await works(healthy, target)
        site.prefill.signal(signal.SIGCONT)
        for fetch, offer in zip(fetches, offers, strict=True):
            await fetch.blocks_freed()
            await offer.withdraw()
            await offer.released()

        assert {failure.code for failure in failures} <= set(NO_ANSWER)
        assert meanwhile
        assert await works(source, target)


@pytest.mark.parametrize("without", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
async def test_an_agent_without_staging_is_read_directly_or_a_forced_path_fails(
    fresh: Started, without: str
) -> None:
    nothing = {"staging_bytes": 0}
    prefill = fresh.prefill(**(nothing if without == "prefill" else {}))
    auto = fresh.decode(**(nothing if without == "decode" else {}))
    forced = fresh.decode(**(nothing if without == "decode" else {}), path="packed")
    fresh.start(prefill, auto, forced)
    async with (
        pair(prefill.attach, auto.attach) as (source, target),
        engine(DecodeSession, forced.attach, seed=3) as unable,
    ):
        before = unable.snapshot()
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})

        fetch = unable.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        failure = await failure_of(fetch)

        assert (failure.code, failure.blocks_free) == (ErrorCode.CONFIG, True)
        assert "path" in failure.message
        assert "staging_bytes" in failure.message
        assert same(unable.snapshot(), before)
        assert await works(source, target)
        await offer.withdraw()


async def test_more_boxes_than_may_wait_are_busy_and_their_fetch_says_so(fresh: Started) -> None:
    prefill = fresh.prefill(**SLOW_READS, **RING, max_packs=1)
    decode = fresh.decode(**SLOW_READS, **RING, path="packed", boxes_in_flight=8)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach, **LONG) as (source, target):
        assert await works(source, target)  # no box waits for torch from here on
        num_tokens = 64 * NUM_LARGE_BLOCKS
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)

        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()

        assert failure.code is ErrorCode.BUSY
        assert prefill.metric("refusals_total", code="busy") >= 1
        await until(lambda: slots(prefill) == 0)
        await offer.withdraw()
        await offer.released()
        assert await works(source, target)
