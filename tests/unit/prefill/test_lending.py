"""The memory socket: who gets an engine's memory, what of it, and who is refused."""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.memory.attach import FrameChannel, close_fds, connect_to_agent
from kvbus.protocol import LendMemory, MemoryLent, from_body, to_body
from tests.support.agents import until
from tests.support.engines import Engine, make_spec
from tests.unit.prefill.inside import WITHIN_S, PrefillAgent

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(agent: PrefillAgent) -> AsyncIterator[FrameChannel]:
    await until(agent.memory_socket.exists)
    channel = FrameChannel(connect_to_agent(agent.memory_socket))
    try:
        yield channel
    finally:
        channel.close()


def question(agent: PrefillAgent, source: Engine, **changes: Any) -> dict[str, Any]:
    local = agent.local(source)
    lend = LendMemory(agent.boot, local.engine_id, local.memory_id, local.rank_secret)
    return {"op": "lend", "body": {**to_body(lend), **changes}}


async def ask(channel: FrameChannel, message: dict[str, Any]) -> tuple[MemoryLent, list[int]]:
    answer, fds = await channel.request(message)
    return from_body(MemoryLent, answer), fds


async def borrow(channel: FrameChannel, agent: PrefillAgent, source: Engine) -> None:
    _, fds = await ask(channel, question(agent, source))
    assert fds
    close_fds(fds)


async def refusal(channel: FrameChannel, message: dict[str, Any]) -> ErrorCode:
    with pytest.raises(RequestRefused) as refused:
        await ask(channel, message)
    return refused.value.code


def num_open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_who_has_the_right_gets_every_segment_for_reading_only(agent: PrefillAgent) -> None:
    async with agent.engine(make_spec(tp=2)) as source, connected(agent) as channel:
        lent, fds = await ask(channel, question(agent, source))
        behind, none = await ask(channel, question(agent, source, first=2))
        assert (lent.agent_boot, len(fds)) == (agent.boot, 2)
        assert [(one.rank, one.segment_id) for one in lent.segments] == [(0, "kv"), (1, "kv")]
        for fd, segment, theirs in zip(fds, lent.segments, source.memories().values(), strict=True):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert os.fstat(fd).st_size == segment.size_bytes
            assert os.pread(fd, theirs.numel(), 0) == theirs.numpy().tobytes()
        close_fds(fds)
        assert (behind.segments, none) == ((), [])


async def test_who_shows_something_else_gets_nothing_and_may_ask_again(agent: PrefillAgent) -> None:
    async with agent.engine() as source, connected(agent) as channel:
        right = question(agent, source)
        for wrong in ({"op": "hello", "body": {}}, {"body": 1}):
            assert await refusal(channel, right | wrong) is ErrorCode.UNKNOWN_OP
        before = num_open_fds()
        for name, value, code in (
            ("rank_secret", "x" * 32, ErrorCode.FORBIDDEN),
            ("agent_boot", "another", ErrorCode.STALE),
            ("memory_id", "another", ErrorCode.STALE),
            ("engine_id", "another", ErrorCode.ENGINE_UNKNOWN),
            ("rank_secret", None, ErrorCode.INVALID),
            ("first", -1, ErrorCode.INVALID),
        ):
            refused = await refusal(channel, question(agent, source, **{name: value}))
            assert refused is code, name
        await borrow(channel, agent, source)
        await until(lambda: num_open_fds() == before)


async def test_connection_serves_one_engine_and_ends_with_it_alone(agent: PrefillAgent) -> None:
    async with agent.engine() as stays, connected(agent) as other, connected(agent) as channel:
        async with agent.engine() as source:
            await borrow(channel, agent, source)
            await borrow(other, agent, stays)
            assert await refusal(channel, question(agent, stays)) is ErrorCode.STALE
        with pytest.raises(anyio.EndOfStream), anyio.fail_after(WITHIN_S):
            await channel.receive()
        await borrow(other, agent, stays)
