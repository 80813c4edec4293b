"""An agent is dead, stopped, or says nothing: who waits for it is told, and finds it again.

What is decided then, and when, is shown by the scenes of the simulated world; here are the kernel's
signals, libzmq's connections and the SDK.
"""

import json
import shlex
import signal
import uuid
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.engine.bounce import HostPrefill
from kvbus.errors import AgentHungUp, ErrorCode, KVBusError, PeerLost
from kvbus.keys import Role
from kvbus.protocol import Outcome
from tests.agents import until
from tests.chaos.links import PROXY_HOST
from tests.engines import (
    LARGE,
    NUM_LARGE_BLOCKS,
    engine,
    failure_of,
    make_spec,
    pair,
    start_long_read,
    works,
)
from tests.faults.conftest import DECODE, PREFILL, SLOW_READS, Started
from tests.faults.losing_link import lossy
from tests.host_engines import host_engine
from tests.keyring import KeyRing
from tests.memories import NHD, Memory

pytestmark = pytest.mark.anyio

NOTHING: dict[str, Any] = {"num_tokens": 0, "block_ids": {"full": []}}
ONE_BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}
LARGE_TOKENS = NUM_LARGE_BLOCKS * LARGE.block_size
NUM_TOKENS, NUM_LOST = 40, 3


async def test_the_death_of_a_prefill_agent_is_told_by_name_long_before_the_lease_ends(
    fresh: Started,
) -> None:
    patient = {"lease_s": 300.0, "request_timeout_s": 300.0}
    prefill, decode = fresh.prefill(max_lease_s=300.0), fresh.decode(**patient)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=300.0)
        await until(lambda: prefill.status()["counts"]["leases"] == 1)

        prefill.kill()
        failure = await failure_of(fetch)
        again = target.decode.fetch(offer.ticket, **NOTHING, timeout_s=300.0)
        late = await failure_of(again)

        assert (failure.code, failure.blocks_free) == (ErrorCode.PEER_LOST, True)
        assert late.code is ErrorCode.PEER_LOST
        assert decode.says("peer.lost", peer=prefill.peer, level="warning", num_fetches=1)


async def test_a_save_after_its_agent_has_gone_says_so_and_frees_the_ring(fresh: Started) -> None:
    prefill = fresh.prefill()
    fresh.start(prefill)
    spec = make_spec(groups=(LARGE,))
    async with host_engine(
        PrefillSession,
        prefill.attach,
        spec,
        memory=Memory(),
        num_blocks=NUM_LARGE_BLOCKS,
        ring_blocks={"full": NUM_LARGE_BLOCKS},
        piece_bytes=1 << 20,
    ) as source:
        assert isinstance(source.host, HostPrefill)
        offered, begun = [
            await source.host.begin(name, num_tokens=LARGE_TOKENS // 2) for name in "rs"
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


@pytest.mark.parametrize(
    "then", ["it goes on", pytest.param("it is killed", marks=pytest.mark.long)]
)
async def test_a_fetch_of_an_agent_that_is_stopped_for_good_ends_and_its_blocks_stay_in_doubt(
    fresh: Started, then: str
) -> None:
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        heard: list[str] = []
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        fetch = target.decode.fetch(offer.ticket, **ONE_BLOCK, timeout_s=0.5)
        fetch.when_ended(lambda: heard.append("ended"))
        fetch.when_freed(lambda: heard.append("freed"))

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
        assert heard == ["ended", "freed"]
        await offer.withdraw()


async def test_blocks_stay_in_doubt_when_an_agent_hangs_up_on_the_engine_and_lives_on(
    slow: Started,
) -> None:
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


async def test_blocks_are_free_when_an_agent_that_waited_for_its_transfers_has_ended(
    fresh: Started,
) -> None:
    settings = {**SLOW_READS, "transport": {**SLOW_READS["transport"], "close_timeout_s": 3.0}}
    prefill, decode = fresh.prefill(**SLOW_READS), fresh.decode(**settings, drain_timeout_s=0.2)
    fresh.start(prefill, decode)
    large: dict[str, Any] = {"groups": (LARGE,), "num_blocks": NUM_LARGE_BLOCKS}
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


async def test_a_prefill_agent_that_answers_nothing_is_left_and_found_again(fresh: Started) -> None:
    prefill, decode = fresh.prefill(), fresh.decode(forget_peer_s=2.0)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

        prefill.signal(signal.SIGSTOP)
        await until(lambda: decode.logged("peer.left", peer=prefill.peer))
        num_peers = decode.metric("peers")
        prefill.signal(signal.SIGCONT)

        assert num_peers == 0
        assert await works(source, target)


async def test_a_peer_that_nobody_reads_from_is_left_and_met_anew(fresh: Started) -> None:
    prefill, decode = fresh.prefill(mapped=True), fresh.decode(mapped=True, idle_peer_s=0.5)
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        for _ in range(2):
            assert await works(source, target)
            await until(lambda: decode.metric("peers") == 0)
            await until(lambda: decode.metric("mapped_bytes") == 0)
            await until(lambda: prefill.metric("memory_readers") == 0)

    assert decode.logged("mapped.opened")
    assert len(decode.logged("handshake.done")) == 2
    assert not decode.logged("peer.kept")


@pytest.mark.long
async def test_the_command_that_a_fault_names_is_whole_where_there_are_keys(
    fresh: Started,
) -> None:
    ring = KeyRing(fresh.folder)
    prefill = ring.prepare(fresh, Role.PREFILL, "p", **PREFILL)
    decode = ring.prepare(fresh, Role.DECODE, "d", **{**DECODE, "request_timeout_s": 1.0})
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", **NOTHING, sealed=False)
        prefill.signal(signal.SIGSTOP)
        while not decode.metric("silent_peers"):
            await failure_of(target.decode.fetch(offer.ticket, **ONE_BLOCK))
        live = json.loads(decode.page("/live")[1])
        prefill.signal(signal.SIGCONT)
        fault = next(one for one in live["faults"] if prefill.peer in one["what"])
        command = shlex.split(fault["do"].partition("run here: kvbus ")[2])
        done = await anyio.to_thread.run_sync(CliRunner().invoke, app, command)

        assert done.exit_code == 0, done.output
        assert "the prefill agent 'prefill-0' answers" in done.output
        assert f"--server-key={ring.pair('d').public}" in shlex.split(live["key_options"])
        await until(lambda: not decode.status()["silent_peers"])
        await offer.withdraw()


async def test_an_offer_whose_last_reply_was_lost_is_a_completed_fetch(fresh: Started) -> None:
    """The reply, and its connection: what is asked for again on a new one is answered the same."""
    prefill = fresh.prefill(advertise_host=PROXY_HOST)
    decode = fresh.decode(request_timeout_s=20.0)
    fresh.start(prefill, decode)
    async with (
        lossy(prefill, "take", "confirm") as link,
        pair(prefill.attach, decode.attach) as (source, target),
    ):
        assert await works(source, target)
        for _ in range(NUM_LOST):
            theirs, ours = source.some_blocks(3, NUM_TOKENS), target.some_blocks(4, NUM_TOKENS)
            offer = await source.prefill.offer(
                uuid.uuid4().hex, num_tokens=NUM_TOKENS, block_ids=theirs
            )
            link.lose()
            fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours)
            assert await offer.released() is Outcome.COMPLETED
            assert fetch.notice is None

            link.restore()
            await fetch.completed()

        assert link.num_lost >= NUM_LOST
        assert await works(source, target)
