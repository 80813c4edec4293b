"""Memory of a GPU that cannot be passed is refused by name, and that of a killed engine is free."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

import kvbus
from kvbus.engine import Link, RankMemory
from kvbus.errors import ErrorCode, FetchFailed, RequestRefused, SegmentError
from kvbus.geometry import EngineSpec, lay_out_rank
from kvbus.memory.cuda import GpuMemory
from tests.process.gpu.conftest import WITHIN_S
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.agents import Agents, until
from tests.support.cuda.calls import PAGE, Cuda
from tests.support.engines import LARGE, make_spec
from tests.support.memories import NHD

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

ENGINE = str(Path(__file__).with_name("engine_process.py"))
NUM_BLOCKS = 2048
FREED_WITHIN_S = 10.0
"""Of this, the agent takes one second at most; the rest is the driver's, to end a process."""
SHARE = """
import torch
from kvbus.errors import SegmentError
from kvbus.engine import share_tensor
try:
    share_tensor(torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:0"))
except SegmentError as error:
    print(error.message)
"""


@contextmanager
def engine_process(shapes: ShapedAgents, engine_id: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, ENGINE, str(shapes.prefill.attach), engine_id, str(NUM_BLOCKS)]
    path = ":".join([str(Path(kvbus.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield process
        process.kill()


def free_bytes() -> int:
    cuda = Cuda()
    with cuda.on(0):
        return cuda.free_bytes()


def line_of(process: subprocess.Popen[str]) -> str:
    out: IO[str] | None = process.stdout
    assert out is not None
    return out.readline()


def rank_memory(spec: EngineSpec) -> RankMemory:
    return RankMemory.allocate(spec, 0, NHD, num_blocks=NUM_BLOCKS, device="cuda:0")


async def test_the_memory_of_a_killed_engine_is_free_again(shapes: ShapedAgents) -> None:
    engine_id = uuid.uuid4().hex
    with engine_process(shapes, engine_id) as doomed:
        size_bytes, _ = int(line_of(doomed)), line_of(doomed)
        before = free_bytes()
        doomed.kill()
        await until(lambda: free_bytes() >= before + size_bytes, FREED_WITHIN_S)

    assert size_bytes >= 1 << 28
    assert shapes.prefill.says("engine.lost", engine_id=engine_id)
    assert not shapes.prefill.logged("segment.kept")


# Its memory is read by the decode agent's process when it dies. What a GPU then reads is undefined.
async def test_a_fetch_fails_whose_engine_is_killed_while_it_copies(shapes: ShapedAgents) -> None:
    engine_id = uuid.uuid4().hex
    spec = make_spec(groups=(LARGE,))
    blocks = {LARGE.name: range(NUM_BLOCKS)}
    num_tokens = NUM_BLOCKS * LARGE.block_size
    async with Link(shapes.decode["auto"].attach, spec, memory=rank_memory(spec)) as decode:
        with engine_process(shapes, engine_id) as doomed:
            line_of(doomed)
            ticket = json.loads(line_of(doomed))
            landed = list[int]()
            fetch = decode.fetch(
                ticket,
                num_tokens=num_tokens,
                block_ids=blocks,
                chunk_tokens=LARGE.block_size,
                on_landed=landed.append,
            )
            await until(lambda: landed)
            doomed.kill()
            with pytest.raises(FetchFailed):
                await fetch.ended
            await fetch.freed
    assert len(landed) < NUM_BLOCKS


async def test_an_agent_that_does_not_see_the_gpu_says_how_it_would(fresh: Agents) -> None:
    blind = fresh.prepare("prefill", env={"CUDA_VISIBLE_DEVICES": ""})
    fresh.start(blind)
    spec = make_spec(groups=(LARGE,))
    link = Link(blind.attach, spec, memory=rank_memory(spec))
    with pytest.raises(RequestRefused, match="CUDA_VISIBLE_DEVICES") as refused:
        await link.__aenter__()

    assert refused.value.code is ErrorCode.SEGMENT


def parted(*, handle_types: int) -> int:
    driver = Cuda()
    with driver.on(0):
        return driver.map_new(PAGE, handle_types=handle_types)


def test_memory_without_a_handle_type_is_refused_with_a_remedy() -> None:
    at = parted(handle_types=0)
    with pytest.raises(SegmentError, match="CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
        GpuMemory(0, at, PAGE)


def test_memory_beyond_what_is_mapped_is_refused() -> None:
    at = parted(handle_types=1)
    GpuMemory(0, at, PAGE)
    with pytest.raises(SegmentError, match="cannot be opened by another process"):
        GpuMemory(0, at, 2 * PAGE)


async def test_an_engine_whose_memory_is_gone_attaches_nothing(shapes: ShapedAgents) -> None:
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=4)
    (segment,) = rank.segments
    at = parted(handle_types=1)
    memory = RankMemory(rank, {segment.segment_id: GpuMemory(0, at, segment.size_bytes)})
    driver = Cuda()
    with driver.on(0):
        driver.cuMemUnmap(at, PAGE)
    with pytest.raises(SegmentError, match="cannot be opened by another process"):
        await Link(shapes.prefill.attach, spec, memory=memory).__aenter__()


@pytest.mark.needs_torch_cuda
def test_expandable_segments_can_be_passed() -> None:
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", SHARE]
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=WITHIN_S, check=True
    )
    assert not ended.stdout or "POSIX_FILE_DESCRIPTOR" in ended.stdout
