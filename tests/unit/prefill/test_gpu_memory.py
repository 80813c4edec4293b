"""Memory of a GPU at a prefill agent: refused by name without CUDA."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from kvbus.bus import new_boot_id
from kvbus.engine import RankMemory
from kvbus.errors import ErrorCode, RequestRefused, SegmentError
from kvbus.memory.attach import AttachClient
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import Hello, PassCuda, PassSegment, to_body
from tests.support.agents import until
from tests.support.memories import NHD
from tests.unit.prefill.inside import PrefillAgent, prefill_agent

pytestmark = pytest.mark.anyio

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: see tests/process/gpu"
)
GPU = f"GPU-{UUID(int=1)}"
PASSED: dict[str, Any] = {"segment_id": "kv", "device": GPU, "handle": bytes(64)}
PASSED |= {"offset_bytes": 0, "size_bytes": 4096}


@asynccontextmanager
async def greeted(agent: PrefillAgent) -> AsyncIterator[AttachClient]:
    async with AttachClient(agent.attach) as client:
        hello = Hello(min_protocol=1, max_protocol=1, engine_id="e", boot=new_boot_id())
        await client.call({"op": hello.op, "body": to_body(hello)})
        yield client


async def refusal(client: AttachClient, **changes: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await client.call({"op": PassCuda.op, "body": PASSED | changes})
    return refused.value


@needs_no_gpu
async def test_agent_without_cuda_names_lack_and_serves_host_engines(agent: PrefillAgent) -> None:
    async with AttachClient(agent.attach) as client:
        assert (await refusal(client)).code is ErrorCode.NOT_REGISTERED, "it did not say hello"
    async with agent.engine() as before, greeted(agent) as client:
        refused = await refusal(client)
        assert refused.code is ErrorCode.SEGMENT
        assert "NVIDIA driver" in refused.message
        assert agent.local(before).ready
        async with agent.engine() as after:
            assert agent.local(after).ready


async def test_agent_without_slots_refuses_cuda_before_gpu_lookup(folder: Path) -> None:
    async with prefill_agent(folder, staging_bytes=0) as agent, greeted(agent) as client:
        refused = await refusal(client)
    assert refused.code is ErrorCode.CONFIG
    assert "'staging_bytes'" in refused.message


async def test_a_rank_has_all_of_its_memory_in_one_place(agent: PrefillAgent) -> None:
    host = PassSegment("host", 4096)
    with SharedSegment(4096, name="in-one-place") as segment:
        async with greeted(agent) as client:
            await client.call({"op": host.op, "body": to_body(host)}, [segment.fd])
            refused = await refusal(client)
    await until(lambda: "in-one-place" not in Path("/proc/self/maps").read_text())
    assert f"on {GPU}, those before it on host" in refused.message


@needs_no_gpu
async def test_the_sdk_says_what_it_cannot_do_without_cuda_memory(agent: PrefillAgent) -> None:
    async with agent.engine() as source:
        for device, words in (("cuda:0", "NVIDIA driver"), ("meta", "no agent can open memory")):
            with pytest.raises(SegmentError, match=words):
                RankMemory.allocate(source.spec, 0, NHD, num_blocks=4, device=device)
