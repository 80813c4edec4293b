"""A process that passes memory without end, or connects so: refused, and the others go on."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from kvbus.engine import DecodeSession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.memory.attach import AttachClient
from tests.agents import AgentProcess, Agents
from tests.engines import engine, works

pytestmark = pytest.mark.anyio
SEGMENT_BYTES = 4096
CONNECT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect(sys.argv[1])
    connected.settimeout(1)
    try:
        sys.stdout.buffer.write(connected.recv(4096))
    except TimeoutError:
        pass  # it is let in, and not spoken to
"""


@asynccontextmanager
async def greeted(agent: AgentProcess, boot: str) -> AsyncIterator[AttachClient]:
    """A connection that has said hello."""
    async with AttachClient(agent.attach) as client:
        hello = {"min_protocol": 1, "max_protocol": 1, "engine_id": "hostile", "boot": boot}
        await client.call({"op": "hello", "body": hello})
        yield client


async def num_taken(client: AttachClient, most: int) -> tuple[int, RequestRefused]:
    """How many segments are taken before one is refused, and how that is."""
    fd = os.memfd_create("segment", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SEGMENT_BYTES)
    try:
        for number in range(most):
            segment = {"segment_id": str(number), "size_bytes": SEGMENT_BYTES, "direct": True}
            try:
                await client.call({"op": "segment", "body": segment}, [fd])
            except RequestRefused as refused:
                return number, refused
    finally:
        os.close(fd)
    raise AssertionError(f"{most} segments were taken")


async def test_one_process_passes_so_many_segments_and_no_more(fresh: Agents):
    prefill = fresh.prepare("prefill", max_process_segments=50)
    decode = fresh.prepare("decode")
    fresh.start(prefill, decode)
    async with (
        greeted(prefill, "a" * 32) as client,
        engine(PrefillSession, prefill.attach) as source,
        engine(DecodeSession, decode.attach) as target,
    ):
        taken, refused = await num_taken(client, 1000)
        mapped = prefill.memory_maps("memfd:segment")
        still_works = await works(source, target)

    assert (taken, mapped) == (50, 50)
    assert refused.code is ErrorCode.BUSY
    assert "max_process_segments" in refused.message
    assert still_works


async def test_one_process_takes_so_many_connections_and_leaves_some_to_others(
    fresh: Agents,
):
    agent = fresh.prepare("prefill", max_engine_processes=64)
    fresh.start(agent)
    async with AsyncExitStack() as stack:
        for number in range(48):
            await stack.enter_async_context(greeted(agent, f"{number:032}"))
        refusals = []
        for number in range(48, 64):
            with pytest.raises(RequestRefused) as refused:
                await stack.enter_async_context(greeted(agent, f"{number:032}"))
            refusals.append(refused.value)
        command = [sys.executable, "-c", CONNECT, str(agent.attach)]
        other = await anyio.run_process(command, check=False)

    assert {refused.code for refused in refusals} == {ErrorCode.BUSY}
    assert "max_process_connections" in refusals[0].message
    assert other.stdout == b"", "it was turned away"
    assert other.returncode == 0
