"""GPU memory that cannot be passed is refused by name, and that of a killed engine is freed."""

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbus
from kvbus.engine import Connection, share_tensor
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import KvLayout
from kvbus.memory.cuda import CudaStorage
from kvbus.protocol import PassCuda
from tests.process.gpu.conftest import WITHIN_S
from tests.process.handoffs.shapes import ShapedAgents
from tests.support.agents import Agents, until
from tests.support.engines import make_spec, rank_link

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(600)]

ENGINE = str(Path(__file__).with_name("engine_process.py"))
SHARE = """
import torch
from kvbus.errors import SegmentError
from kvbus.engine import share_tensor
try:
    share_tensor(torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:0"))
except SegmentError as error:
    print(error.message)
"""
NHD = KvLayout.parse("NHD")
FREED_WITHIN_S = 10.0
"""Of this, the agent takes one second at most; the rest is the driver's, to end a process."""


def child(*command: str, **env: str) -> subprocess.Popen[str]:
    """A Python process of its own."""
    path = str(Path(kvbus.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


def free_bytes() -> int:
    """What nobody has of the GPU."""
    return torch.cuda.mem_get_info(0)[0]


async def test_the_memory_of_a_killed_engine_is_free_again(shapes: ShapedAgents) -> None:
    engine_id = uuid.uuid4().hex
    with child(ENGINE, str(shapes.prefill.attach), engine_id, "8192") as doomed:
        assert doomed.stdout is not None
        size_bytes = int(doomed.stdout.readline())
        before = free_bytes()
        doomed.kill()
        await until(lambda: free_bytes() >= before + size_bytes, FREED_WITHIN_S)

    assert size_bytes >= 1 << 30
    assert shapes.prefill.says("engine.lost", engine_id=engine_id)
    assert not shapes.prefill.logged("segment.kept")


async def test_an_agent_that_does_not_see_the_gpu_says_how_it_would(fresh: Agents) -> None:
    blind = fresh.prepare("prefill", env={"CUDA_VISIBLE_DEVICES": ""})
    fresh.start(blind)
    link, _ = rank_link(blind.attach, make_spec(), 0, device="cuda:0")
    with pytest.raises(RequestRefused, match="CUDA_VISIBLE_DEVICES") as refused:
        await link.__aenter__()

    assert refused.value.code is ErrorCode.SEGMENT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"handle": bytes(64)}, "cuIpcOpenMemHandle"),
        ({"device": "GPU-of-nobody"}, "does not see GPU-of-nobody"),
        ({"offset_bytes": 1 << 40}, "were claimed of a CUDA allocation"),
    ],
    ids=["no handle", "no such GPU", "beyond the allocation"],
)
async def test_what_cannot_be_opened_is_refused_and_the_agent_goes_on(
    shapes: ShapedAgents, change: dict[str, Any], words: str
) -> None:
    tensor = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:0")
    storage = share_tensor(tensor)
    assert isinstance(storage, CudaStorage)
    fields: dict[str, Any] = {
        "segment_id": "kv",
        "device": storage.device,
        "handle": storage.handle,
        "offset_bytes": storage.offset_bytes,
        "size_bytes": storage.size_bytes,
    }
    async with Connection(shapes.prefill.attach, make_spec().engine_id) as connection:
        with pytest.raises(RequestRefused, match=words):
            await connection.pass_memory(PassCuda(**fields | change))
        await connection.pass_memory(PassCuda(**fields))


def test_memory_of_expandable_segments_is_refused_with_setting() -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with child("-c", SHARE, **setting) as process:
        said, _ = process.communicate(timeout=WITHIN_S)

    assert "expandable_segments:False" in said


def test_a_view_is_shared_with_its_whole_storage() -> None:
    whole = torch.zeros(4, 1 << 20, dtype=torch.uint8, device="cuda:0")

    with share_tensor(whole[2]) as storage:
        assert isinstance(storage, CudaStorage)
        assert storage.size_bytes == whole.numel()
        assert storage.offset_bytes_of(whole[3]) == 3 << 20
        assert storage.tensor.data_ptr() == whole.data_ptr()
