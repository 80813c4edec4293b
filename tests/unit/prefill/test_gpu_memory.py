"""Memory of a GPU at a prefill agent: refused by name without CUDA; read through a stand-in."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbus.bus import new_boot_id
from kvbus.data.messages import HOST
from kvbus.engine import Connection, RankMemory
from kvbus.errors import ErrorCode, RequestRefused, SegmentError
from kvbus.geometry import lay_out_rank
from kvbus.memory.attach import AttachClient
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import Hello, PassCuda, PassSegment, Register, to_body
from tests.support.agents import until
from tests.support.engines import NUM_BLOCKS, make_spec
from tests.support.gpu_stand_in import GPU, StandIn, engine_on, gpu
from tests.support.memories import NHD
from tests.unit.prefill.inside import SETTINGS, PrefillAgent, prefill_agent
from tests.unit.prefill.leases import leased

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: see tests/process/gpu"
)
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
        for device, words in (("cuda:0", "CUDA"), ("meta", "no agent can open memory of meta")):
            with pytest.raises(SegmentError, match=words):
                RankMemory.allocate(source.spec, 0, NHD, num_blocks=4, device=device)


async def test_tile_is_gathered_into_slot_of_engines_gpu(gpu: StandIn, agent: PrefillAgent) -> None:
    async with (
        engine_on(gpu, agent.attach, seed=1) as source,
        engine_on(gpu, agent.attach, seed=2) as neighbour,
        agent.engine() as on_host,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
        leased(agent, on_host, reader) as here,
    ):
        done, packed, other = await case.shake(), await case.packed(), await here.packed()
        in_use = agent.counts["slots"]
        assert torch.equal(case.slot(packed), case.wanted())
        assert torch.equal(here.slot(other), here.wanted())
        assert gpu.num_copies == 1
        assert done.memory.addresses == ({},)
        assert case.local.devices == agent.local(neighbour).devices == {GPU}
        staging, engines = agent.runtime.agent.staging, agent.runtime.agent.engines
        assert staging.of(case.local.devices) == [staging.at(GPU)]
        assert staging.of(here.local.devices) == [staging.at(HOST)]
        assert packed.slot_id != other.slot_id
        await case.give_back(packed)
        await here.commit()
        assert (in_use, agent.counts["slots"]) == (2, 0)
        assert staging.registered_bytes == 2 * SETTINGS["staging_bytes"]
        assert engines.registered_bytes == on_host.memories()[0].numel()


async def test_handle_that_does_not_open_is_refused(gpu: StandIn, agent: PrefillAgent) -> None:
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=NUM_BLOCKS)
    segment = rank.segments[0]
    place = {"segment_id": segment.segment_id, "size_bytes": segment.size_bytes}
    async with Connection(agent.attach, spec.engine_id) as connection:
        await connection.pass_memory(PassCuda(**PASSED | place))
        with pytest.raises(RequestRefused, match="no such handle") as refused:
            await connection.request(Register(engine=spec, rank=rank))
    assert refused.value.code is ErrorCode.SEGMENT
    assert gpu.num_open == 0
