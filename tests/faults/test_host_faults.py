"""Engines that go through a ring, when an agent is gone: all ends, and the ring is free again."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.engine.bounce import HostFetch, HostOffer
from kvbus.errors import ErrorCode, KVBusError, PeerLost
from tests.agents import AgentProcess, until
from tests.engines import LARGE, NUM_LARGE_BLOCKS, failure_of, make_spec
from tests.faults.conftest import SLOW_READS
from tests.host_engines import HostEngine, host_engine
from tests.memories import Memory

pytestmark = pytest.mark.anyio

SHAPE = {
    "memory": Memory(),
    "num_blocks": NUM_LARGE_BLOCKS,
    "ring_blocks": {"full": NUM_LARGE_BLOCKS},
    "piece_bytes": 1 << 20,
}
NUM_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
BLOCKS = {"full": list(range(NUM_LARGE_BLOCKS))}
GONE = (
    ErrorCode.PEER_LOST,
    ErrorCode.TRANSFER_FAILED,
    ErrorCode.LEASE_EXPIRED,
    ErrorCode.TIMEOUT,
)


@asynccontextmanager
async def a_long_handoff(
    prefill: AgentProcess, decode: AgentProcess
) -> AsyncIterator[tuple[HostEngine, HostEngine, HostOffer, HostFetch]]:
    """Through two rings, of which the first bytes are on the other device."""
    specs = [make_spec(groups=(LARGE,)) for _ in range(2)]
    async with (
        host_engine(PrefillSession, prefill.attach, specs[0], seed=1, **SHAPE) as source,
        host_engine(DecodeSession, decode.attach, specs[1], seed=2, **SHAPE) as target,
    ):
        before = target.views()[0, 0, "k"][0].clone()
        offer = await source.host.begin("r", num_tokens=NUM_TOKENS)
        await offer.save(NUM_TOKENS, BLOCKS)
        ticket = await offer.offer()
        await offer.seal()
        fetch = target.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=BLOCKS, timeout_s=10.0)
        await until(lambda: not target.views()[0, 0, "k"][0].equal(before))
        yield source, target, offer, fetch


@pytest.mark.parametrize("killed", ["prefill", "decode"])
async def test_a_killed_agent_ends_what_goes_through_the_ring(fresh, killed):
    prefill, decode = agents = fresh.prefill(**SLOW_READS), fresh.decode(**SLOW_READS)
    fresh.start(*agents)
    async with a_long_handoff(prefill, decode) as (source, target, offer, fetch):
        agents[killed == "decode"].kill()
        failure = await failure_of(fetch)
        with anyio.fail_after(60):
            if killed == "prefill":
                with pytest.raises(PeerLost):
                    await offer.released()
                with pytest.raises(KVBusError):
                    await source.host.session.ready()
            else:
                await offer.abort()
                await offer.released()
            await until(lambda: not target.ring.num_held)

        assert failure.code in GONE
        assert failure.stage == ("lost" if killed == "decode" else failure.stage)
        assert (source.ring.num_held, target.ring.num_held) == (0, 0)


async def test_the_ring_is_withheld_while_a_stopped_prefill_agent_may_still_be_read(slow):
    prefill, decode = slow.all
    async with a_long_handoff(prefill, decode) as (_, target, offer, fetch):
        prefill.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        held = target.ring.num_held
        prefill.signal(signal.SIGCONT)
        await until(lambda: not target.ring.num_held)
        await offer.abort()
        await offer.released()

        assert failure.code in GONE
        assert failure.blocks_free, "the engine's own blocks are not written by the agent"
        assert held == NUM_LARGE_BLOCKS


async def test_a_save_after_its_agent_has_gone_says_so_and_frees_the_ring(fresh):
    prefill = fresh.prefill()
    fresh.start(prefill)
    spec = make_spec(groups=(LARGE,))
    async with host_engine(PrefillSession, prefill.attach, spec, **SHAPE) as source:
        offered, begun = [
            await source.host.begin(name, num_tokens=NUM_TOKENS // 2) for name in "rs"
        ]
        await offered.offer()

        prefill.kill()
        with pytest.raises(PeerLost):
            await offered.released()
        with pytest.raises(KVBusError, match="its offer has ended"):
            await offered.save(LARGE.block_size, {"full": [1]})
        with pytest.raises(PeerLost):
            await begun.offer()
        await begun.abort()

        assert source.ring.num_held == 0
