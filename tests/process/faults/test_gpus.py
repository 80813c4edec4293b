"""Agents with engines on fake GPUs: bad memory is refused at attach, and a lost GPU ends no agent.

Each test runs in a process whose driver is the fake, and starts its agents there.
"""

import os
import random
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import Connection, Link, RankMemory
from kvbus.errors import ErrorCode, RequestRefused, SegmentError
from kvbus.geometry import KvLayout
from kvbus.memory import cuda
from kvbus.memory.cuda import GpuAllocation, GpuMemory
from kvbus.protocol import PassCuda, Register
from tests.support import cuda as fake
from tests.support.agents import AgentProcess, Agents, agents_ended
from tests.support.cuda.apart import apart
from tests.support.cuda.calls import PAGE, Cuda
from tests.support.engines import make_spec

KERNELS = (Path(cuda.__file__).with_name("copy_lattice.cu"),)
NHD = KvLayout.parse("NHD")
NUM_BLOCKS, BLOCK_TOKENS = 4, 16
ALL_TOKENS = NUM_BLOCKS * BLOCK_TOKENS
ALL_BLOCKS = {"full": list(range(NUM_BLOCKS))}
CONTEXT_BYTES = 300 << 20
OLD = "11080"
"""CUDA 11.8, which does not know the PTX of the copy kernels."""
PID, PID_OFFSET = struct.Struct("<i"), 24
"""In a handle of the fake."""
ILLEGAL_ADDRESS = 700


@contextmanager
def agents_here() -> Iterator[Agents]:
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


def pass_cuda(storage: GpuAllocation, segment_id: str) -> dict[str, Any]:
    with storage.memory.exported() as (source, _):
        return {
            "segment_id": segment_id,
            "device": source.device,
            "handle": source.handle,
            "offset_bytes": source.offset_bytes,
            "size_bytes": storage.size_bytes,
        }


async def attach(agent: AgentProcess, *fds: int, **changes: Any) -> None:
    """Attach an engine whose memory is passed with ``fds`` and ``changes``."""
    spec = make_spec()
    memory = RankMemory.allocate(spec, 0, NHD, num_blocks=NUM_BLOCKS, device="cuda:0")
    ((segment_id, storage),) = memory.storages.items()
    assert isinstance(storage, GpuAllocation)
    async with Connection(agent.attach, spec.engine_id) as connection:
        message = PassCuda(**pass_cuda(storage, segment_id) | changes)
        await connection.pass_memory(message, *fds)
        await connection.request(Register(engine=spec, rank=memory.rank))
    memory.close()


async def refusal_of(agent: AgentProcess, *fds: int, **changes: Any) -> str:
    with pytest.raises(RequestRefused) as refused:
        await attach(agent, *fds, **changes)
    assert refused.value.code in (ErrorCode.SEGMENT, ErrorCode.CONFIG)
    return refused.value.message


def handle_of(pid: int) -> bytes:
    """A handle as that process would export it."""
    allocation = GpuAllocation(4096, 0)
    with allocation.memory.exported() as (source, _):
        handle = bytearray(source.handle)
    allocation.close()
    PID.pack_into(handle, PID_OFFSET, pid)
    return bytes(handle)


@apart(kernels=KERNELS)
def test_memory_that_cannot_be_opened_is_refused_at_attach() -> None:
    anyio.run(_refuse_bad_memory)


async def _refuse_bad_memory() -> None:
    with agents_here() as agents:
        agent = agents.prepare("prefill")
        agents.start(agent)

        unknown = await refusal_of(agent, device="GPU-of-nobody")
        foreign = await refusal_of(agent, device=fake.uuid(0, mig=True))
        stale = await refusal_of(agent, handle=bytes(64))
        own = await refusal_of(agent, handle=handle_of(agent.data_pid))
        beyond = await refusal_of(agent, offset_bytes=1 << 40)
        empty = await refusal_of(agent, handle=b"")
        driver = Cuda()
        with driver.on(0):
            part = driver.export(driver.map_new(PAGE))
        some: dict[str, Any] = {"handle": b"", "parts": (PAGE,), "size_bytes": PAGE + 1}
        lacking = await refusal_of(agent, part, **some)
        os.close(part)
        await attach(agent)

        assert "does not see GPU-of-nobody, but GPU-" in unknown
        assert "does not see MIG-" in foreign
        assert "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE" in stale
        assert "have the same PID" in own
        assert "were claimed of a CUDA allocation" in beyond
        assert "of parts of 2097152 bytes" in lacking
        assert "either a handle or parts" in empty
        assert not agent.logged("data.ended")
        agent.expected_trouble.add("request.refused")


BLIND = {"CUDA_VISIBLE_DEVICES": ""}
REFUSALS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    (BLIND, {}, "CUDA_ERROR_NO_DEVICE, as this process sees no GPU: start it"),
    ({"FAKE_CUDA_MIG": "1"}, {}, "does not see GPU-"),
    ({"FAKE_CUDA_VERSION": OLD}, {}, "refuses the copy kernels for Fake GPU 0: cuModuleLoadData"),
    ({"FAKE_CUDA_FAULTS": "no_open=201"}, {}, "have the same PID"),
    ({}, {"staging_bytes": 0}, "key 'staging_bytes' of its configuration is 0"),
]


@apart(kernels=KERNELS)
def test_agents_that_cannot_use_the_gpu_say_why_at_attach() -> None:
    anyio.run(_refuse_all)


async def _refuse_all() -> None:
    with agents_here() as agents:
        wanted = [agents.prepare("prefill", env=env, **more) for env, more, _ in REFUSALS]
        agents.start(*wanted)
        for agent, (_, _, words) in zip(wanted, REFUSALS, strict=True):
            assert words in await refusal_of(agent)
            assert agent.status()["engines"] == {}


@apart(only_fake=True)
def test_memory_without_a_handle_type_is_refused_in_the_engine(cuda: Cuda) -> None:
    cuda.start()
    with pytest.raises(SegmentError, match=r"requested no handle type.*POSIX_FILE_DESCRIPTOR"):
        GpuMemory(0, cuda.map_new(PAGE, handle_types=0), PAGE)


class GpuEngine:
    """An engine with all of its KV on a GPU."""

    def __init__(self, agent: AgentProcess) -> None:
        self._spec = make_spec()
        self.memory = RankMemory.allocate(
            self._spec, 0, NHD, num_blocks=NUM_BLOCKS, device="cuda:0"
        )
        (storage,) = self.memory.storages.values()
        assert isinstance(storage, GpuAllocation)
        self._storage = storage
        self.link = Link(agent.attach, self._spec, memory=self.memory)

    @property
    def content(self) -> bytes:
        return cuda.read_bytes(0, self._storage.address, self._storage.size_bytes)

    def fill(self, seed: int) -> bytes:
        content = random.Random(seed).randbytes(self._storage.size_bytes)
        cuda.write_bytes(0, self._storage.address, content)
        return content


@asynccontextmanager
async def engines_of(*agents: AgentProcess) -> AsyncIterator[list[GpuEngine]]:
    prefill, decode = map(GpuEngine, agents)
    async with prefill.link, decode.link:
        yield [prefill, decode]


async def fetch_into(target: GpuEngine, ticket: Any) -> bytes:
    target.fill(seed=99)
    fetch = target.link.fetch(ticket, num_tokens=ALL_TOKENS, block_ids=ALL_BLOCKS)
    await fetch.ended
    return target.content


def _lose_gpu_of(role: str) -> None:
    async def run() -> None:
        with agents_here() as agents:
            sides = agents.both()
            loser = next(one for one in sides if one.role == role)
            loser.expected_trouble |= {"data.broken", "data.ended", "not json"}
            async with engines_of(*sides) as (source, target):
                await _hand_over_while_lost(source, target, loser)

    anyio.run(run)


async def _hand_over_while_lost(source: GpuEngine, target: GpuEngine, loser: AgentProcess) -> None:
    world = fake.World(Path(os.environ["FAKE_CUDA_WORLD"]))
    content, pid, data_pid = source.fill(seed=1), loser.pid, loser.data_pid
    tickets = [
        (await source.link.offer(name, num_tokens=ALL_TOKENS, block_ids=ALL_BLOCKS)).ticket
        for name in ("first", "second")
    ]
    with world.faults(f"sticky={ILLEGAL_ADDRESS}@{data_pid}"):
        arrived = await fetch_into(target, tickets[0])

        assert arrived == content
        assert await fetch_into(target, tickets[1]) == content, "the other offer was lost"
    assert loser.alive
    assert (loser.pid, loser.metric("data_restarts")) == (pid, 1)
    assert loser.data_pid != data_pid
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(loser.logged("data.broken"))


@apart(kernels=KERNELS)
def test_a_lost_gpu_of_a_prefill_agent_costs_no_offer() -> None:
    _lose_gpu_of("prefill")


@apart(kernels=KERNELS)
def test_a_lost_gpu_of_a_decode_agent_costs_no_fetch() -> None:
    _lose_gpu_of("decode")


@apart(kernels=KERNELS, context=CONTEXT_BYTES)
def test_the_status_has_the_memory_that_a_context_takes() -> None:
    async def run() -> None:
        with agents_here() as agents:
            agent = agents.prepare("prefill")
            agents.start(agent)
            before = agent.status()["processes"][1]["gpu_bytes"]
            async with GpuEngine(agent).link:
                (placed,) = agent.says("staging.placed")
                status = agent.status()

        assert before == {}
        assert placed["gpu_bytes"] == CONTEXT_BYTES
        assert status["processes"][1]["gpu_bytes"] == {fake.uuid(0): CONTEXT_BYTES}

    anyio.run(run)
