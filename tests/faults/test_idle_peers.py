"""Agents with nothing to do leave each other alone, and know at once that one has come back."""

import pytest

from tests.agents import AgentProcess, until
from tests.engines import pair, works

pytestmark = pytest.mark.anyio

LOOKS_OF_FIVE_S = 50


async def looks(agent: AgentProcess, num: int) -> None:
    """Return when the agent's event loop has looked so often at its lag: ten times a second."""
    began = agent.metric("event_loop_lag_seconds_count")
    await until(lambda: agent.metric("event_loop_lag_seconds_count") >= began + num)


async def test_a_peer_whose_heartbeats_come_is_not_asked_for_a_sign_of_life(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        await looks(decode, LOOKS_OF_FIVE_S // 2)
        num_before = prefill.metric("peer_pings")

        await looks(decode, LOOKS_OF_FIVE_S)

        assert prefill.metric("peer_pings") <= num_before + 1


async def test_an_idle_peer_that_came_back_is_known_without_a_fetch(fresh):
    prefill, decode = fresh.prefill(), fresh.decode()
    fresh.start(prefill, decode)
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

    prefill.kill()
    fresh.start(prefill)

    await until(lambda: decode.logged("peer.restarted", peer=prefill.peer))


async def test_a_peer_that_nobody_reads_from_is_left_and_met_anew(fresh):
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
