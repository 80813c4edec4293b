"""An engine that is killed takes its offers and fetches with it, and its memory; nothing else."""

import json
import signal

import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode
from kvbus.protocol import Outcome
from tests.agents import AgentProcess, until
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    engine,
    failure_of,
    make_spec,
    start_long_read,
    works,
)
from tests.faults.engine_processes import num_mappings_of

pytestmark = pytest.mark.anyio


def reads(decode: AgentProcess) -> bool:
    """Whether something is on its way into blocks."""
    return decode.metric("outstanding_handles") > 0 or decode.metric("copies") > 0


@pytest.mark.parametrize("role", ["prefill", "staged-prefill"])
async def test_a_killed_prefill_engine_fails_its_reader_and_its_memory_is_gone(
    slow_or_copying, start_engine, role
):
    prefill, decode = slow_or_copying.all
    spec = make_spec(groups=(LARGE,))
    async with engine(
        DecodeSession, decode.attach, make_spec(groups=(LARGE,)), num_blocks=NUM_LARGE_BLOCKS
    ) as target:
        doomed = start_engine(prefill, spec.engine_id, role)
        ticket = doomed.said()
        num_tokens = ticket["num_tokens"]
        ours = target.some_blocks(6, num_tokens)
        fetch = target.decode.fetch(ticket, num_tokens=num_tokens, block_ids=ours)
        await until(lambda: reads(decode))
        mapped_before = prefill.memory_maps(spec.engine_id)

        doomed.kill()
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await until(lambda: num_mappings_of(spec.engine_id) == 0)

        assert mapped_before
        assert failure.code is ErrorCode.ENGINE_LOST
        assert prefill.says("engine.lost", engine_id=spec.engine_id)
        assert prefill.says("offer.released", engine_id=spec.engine_id, outcome="withdrawn")
        async with engine(
            PrefillSession, prefill.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=3
        ) as source:
            assert await works(source, target)
        old = target.decode.fetch(ticket, num_tokens=0, block_ids={"full": []})
        gone = (ErrorCode.STALE, ErrorCode.ENGINE_UNKNOWN, ErrorCode.ENGINE_LOST)
        assert (await failure_of(old)).code in gone


@pytest.mark.parametrize("role", ["decode", "staged-decode"])
async def test_a_killed_decode_engine_gives_the_offer_back_and_its_memory_is_gone(
    slow_or_copying, start_engine, role
):
    prefill, decode = slow_or_copying.all
    spec = make_spec(groups=(LARGE,))
    async with engine(
        PrefillSession, prefill.attach, make_spec(groups=(LARGE,)), num_blocks=NUM_LARGE_BLOCKS
    ) as source:
        num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
        theirs = source.some_blocks(5, num_tokens)
        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
        doomed = start_engine(decode, spec.engine_id, role, json.dumps(offer.ticket))
        doomed.said()
        await until(lambda: reads(decode))
        mapped_before = decode.memory_maps(spec.engine_id)

        doomed.kill()
        await until(lambda: num_mappings_of(spec.engine_id) == 0)
        await until(decode.idle)
        await until(lambda: prefill.status()["counts"]["leases"] == 0)

        assert mapped_before
        assert decode.says("engine.lost", engine_id=spec.engine_id)
        assert decode.says("handoff.failed", engine_id=spec.engine_id, code="engine_lost")
        async with engine(
            DecodeSession, decode.attach, spec, num_blocks=NUM_LARGE_BLOCKS, seed=3
        ) as target:
            again = target.decode.fetch(offer.ticket, num_tokens=64, block_ids={"full": [1]})
            await again.completed()

            assert await offer.released() is Outcome.COMPLETED
            assert await works(source, target)


async def test_an_engine_that_comes_back_hears_nothing_of_the_one_before(slow):
    prefill, decode = slow.all
    spec = make_spec(groups=(LARGE,))
    heard: list[object] = []
    async with engine(
        PrefillSession,
        prefill.attach,
        make_spec(groups=(LARGE,)),
        num_blocks=NUM_LARGE_BLOCKS,
        seed=3,
    ) as source:
        async with engine(
            DecodeSession, decode.attach, spec, num_blocks=NUM_LARGE_BLOCKS
        ) as target:
            offer, fetch = await start_long_read(source, target)
            prefill.signal(signal.SIGSTOP)
        await until(lambda: decode.logged("handoff.failed", fetch_id=fetch.fetch_id))

        async with DecodeSession(
            decode.attach, spec, on_fetched=heard.append, on_blocks_freed=heard.append
        ) as control:
            await control.register()
            prefill.signal(signal.SIGCONT)
            await until(lambda: decode.logged("blocks.freed", fetch_id=fetch.fetch_id))
            await until(lambda: num_mappings_of(spec.engine_id) == 0)

        assert heard == []
        await offer.withdraw()
