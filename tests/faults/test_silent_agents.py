"""No engine waits for ever for an agent that is stopped, and each is told things in their order."""

import signal
from contextlib import ExitStack

import pytest

from kvbus.engine import (
    BlockingDecode,
    BlockingMemory,
    BlockingPrefill,
    DecodeSession,
    MemorySession,
    PrefillSession,
)
from kvbus.errors import AgentHungUp, ErrorCode
from kvbus.protocol import BlocksFreed, Fetched
from tests.agents import AgentProcess, until, wait_until
from tests.engines import (
    LARGE,
    NHD,
    NUM_LARGE_BLOCKS,
    engine,
    failure_of,
    make_spec,
    pair,
    start_long_read,
)
from tests.faults.conftest import SLOW_READS

NOTHING = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK = {"num_tokens": 16, "block_ids": {"full": [1]}}


@pytest.mark.anyio
@pytest.mark.parametrize("then", ["it goes on", "it is killed"])
async def test_a_fetch_of_an_agent_that_is_stopped_for_good_ends_and_its_blocks_stay_in_doubt(
    fresh, then
):
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        heard: list[Fetched | BlocksFreed] = []
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=0.5)
        target.decode._on_fetched = heard.append
        target.decode._on_blocks_freed = heard.append

        decode.signal(signal.SIGSTOP)
        failure = await failure_of(fetch)
        free_early = fetch.are_blocks_free
        if then == "it goes on":
            decode.signal(signal.SIGCONT)
        else:
            decode.kill()
        await fetch.blocks_freed()

        assert (failure.code, failure.stage) == (ErrorCode.TIMEOUT, "silent")
        assert (failure.blocks_free, free_early) == (False, False)
        assert "not known" in failure.message
        assert [type(each) for each in heard] == [Fetched, BlocksFreed]
        await offer.withdraw()


@pytest.mark.anyio
async def test_an_agent_that_lives_ends_its_fetches_itself(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)

        failure = await failure_of(target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=7.0))

        assert (failure.code, failure.stage) == (ErrorCode.TIMEOUT, "waiting")
        await offer.withdraw()


@pytest.mark.anyio
async def test_blocks_stay_in_doubt_when_an_agent_hangs_up_on_the_engine_and_lives_on(slow):
    prefill, decode = slow.all
    theirs, ours = (make_spec(groups=(LARGE,)) for _ in range(2))
    num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
    blocks = {"full": list(range(NUM_LARGE_BLOCKS))}
    async with (
        engine(PrefillSession, prefill.attach, theirs, num_blocks=NUM_LARGE_BLOCKS) as source,
        DecodeSession(decode.attach, ours) as control,
    ):
        async with MemorySession(decode.attach, ours, 0) as memory:
            await memory.allocate(NHD, num_blocks=NUM_LARGE_BLOCKS)
            await control.register()
            await control.ready()
            offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=blocks)
            fetch = control.fetch(offer.ticket, num_tokens=num_tokens, block_ids=blocks)
            await until(lambda: decode.metric("outstanding_handles") > 0)

        failure = await failure_of(fetch)  # a rank has left, and with it the engine
        with pytest.raises(AgentHungUp):
            await fetch.blocks_freed()

        assert (failure.stage, failure.code) == ("lost", ErrorCode.PEER_LOST)
        assert not failure.blocks_free
        await offer.withdraw()


@pytest.mark.anyio
async def test_blocks_are_free_when_an_agent_that_waited_for_its_transfers_has_ended(fresh):
    settings = {**SLOW_READS, "transport": {**SLOW_READS["transport"], "close_timeout_s": 3.0}}
    prefill, decode = fresh.prefill(**SLOW_READS), fresh.decode(**settings, drain_timeout_s=0.2)
    fresh.start(prefill, decode)
    large = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
    async with pair(prefill.attach, decode.attach, **large) as (source, target):
        _, fetch = await start_long_read(source, target)

        prefill.signal(signal.SIGSTOP)  # what was posted does not end
        decode.signal(signal.SIGTERM)
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        decode_lives = decode.alive
        # One that went on would be aborted by UCX now and then, as a reader died meanwhile.
        prefill.kill()

        assert (failure.code, failure.blocks_free) == (ErrorCode.DRAINING, False)
        assert not decode_lives


def test_ended_and_freed_fetches_are_taken_in_the_order_in_which_they_came(slow):
    with ExitStack() as stack:
        source, target = blocking_pair(stack, *slow.all)
        num_tokens = NUM_LARGE_BLOCKS * LARGE.block_size
        blocks = {"full": list(range(NUM_LARGE_BLOCKS))}
        offer = source.offer("r", num_tokens=num_tokens, block_ids=blocks)
        fetch = target.fetch(offer.ticket, num_tokens=num_tokens, block_ids=blocks)
        wait_until(lambda: slow.all[1].metric("outstanding_handles") > 0, "it reads")

        target.cancel(fetch, release_offer=True)
        ended: list[Fetched | BlocksFreed] = []
        wait_until(lambda: ended.extend(target.take_ended()) or len(ended) == 2, "both are told")
        source.wait_released(offer)

        assert [type(each) for each in ended] == [Fetched, BlocksFreed]
        assert {each.fetch_id for each in ended} == {fetch.fetch_id}
        assert target.take_ended() == []


def blocking_pair(
    stack: ExitStack, prefill: AgentProcess, decode: AgentProcess
) -> tuple[BlockingPrefill, BlockingDecode]:
    """Two engines without an event loop."""
    specs = [make_spec(groups=(LARGE,)) for _ in range(2)]
    for agent, spec in zip((prefill, decode), specs, strict=True):
        memory = stack.enter_context(BlockingMemory(agent.attach, spec, 0))
        memory.allocate(NHD, num_blocks=NUM_LARGE_BLOCKS)
    source = stack.enter_context(BlockingPrefill(prefill.attach, specs[0]))
    target = stack.enter_context(BlockingDecode(decode.attach, specs[1]))
    for session in (source, target):
        session.register()
        session.ready()
    return source, target
