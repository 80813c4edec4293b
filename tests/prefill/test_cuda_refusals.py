"""CUDA memory where there is no GPU: each side says so, by name, and nothing else suffers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbus.bus import new_boot_id
from kvbus.engine import MemorySession, PrefillSession
from kvbus.errors import ErrorCode, LocalError, RequestRefused, SegmentError
from kvbus.memory.attach import AttachClient
from kvbus.protocol import Hello, PassCuda, to_body
from tests.agents import until
from tests.engines import engine, make_spec
from tests.memories import NHD
from tests.prefill.inside import PrefillAgent, given_back, prefill_agent

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu"),
]

GPU = "GPU-8f7d1a52-0b3c-4e6d-9a1f-2c5b7e904d36"
PASSED = {
    "segment_id": "kv",
    "device": GPU,
    "handle": bytes(64),
    "offset_bytes": 0,
    "size_bytes": 4096,
    "event": bytes(64),
}


@asynccontextmanager
async def greeted(agent: PrefillAgent) -> AsyncIterator[AttachClient]:
    """A connection that has said hello."""
    async with AttachClient(agent.attach) as client:
        hello = Hello(min_protocol=1, max_protocol=1, engine_id="e", boot=new_boot_id())
        await client.call({"op": hello.op, "body": to_body(hello)})
        yield client


async def refusal(client: AttachClient, **changes: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as refused:
        await client.call({"op": PassCuda.op, "body": PASSED | changes})
    return refused.value


async def test_an_agent_without_cuda_says_what_it_lacks(agent: PrefillAgent) -> None:
    async with greeted(agent) as client:
        refused = await refusal(client)

    assert refused.code is ErrorCode.SEGMENT
    assert "torch" in refused.message
    assert "CUDA" in refused.message
    assert "install" in refused.message or "driver" in refused.message


async def test_an_agent_without_slots_refuses_cuda_memory_before_it_looks_for_a_gpu(
    folder: Path,
) -> None:
    async with prefill_agent(folder, staging_bytes=0) as agent, greeted(agent) as client:
        refused = await refusal(client)

    assert refused.code is ErrorCode.CONFIG
    assert "'staging_bytes'" in refused.message


@pytest.mark.parametrize(
    "changes",
    [
        {"handle": bytes(63)},
        {"handle": bytes(65)},
        {"handle": "x" * 64},
        {"event": bytes(65)},
        {"event": bytes(63)},
        {"device": ""},
        {"device": "G" * 65},
        {"offset_bytes": -1},
        {"size_bytes": 0},
        {"size_bytes": 2**62 + 1},
        {"segment_id": ""},
    ],
    ids=str,
)
async def test_fields_out_of_range_are_refused_before_any_of_them_is_used(
    agent: PrefillAgent, changes: dict[str, Any]
) -> None:
    async with greeted(agent) as client:
        refused = await refusal(client, **changes)

    assert refused.code is ErrorCode.INVALID
    assert next(iter(changes)) in refused.message


async def test_who_did_not_say_hello_may_not_pass_cuda_memory(agent: PrefillAgent) -> None:
    async with AttachClient(agent.attach) as client:
        refused = await refusal(client)

    assert refused.code is ErrorCode.NOT_REGISTERED


async def test_a_rank_has_all_of_its_memory_in_one_place(agent: PrefillAgent) -> None:
    async with MemorySession(agent.attach, make_spec(), 0) as session:
        await session.allocate(NHD, num_blocks=4)
        process = next(iter(agent.runtime.agent.engines._by_connection.values()))
        with pytest.raises(LocalError, match=f"on {GPU}, those before it on host"):
            process.segments.check_new("more", GPU)
    await until(lambda: given_back(process))


async def test_a_refused_engine_may_register_shared_memory_instead(agent: PrefillAgent) -> None:
    async with greeted(agent) as client:
        await refusal(client)
        async with agent.engine() as source:
            assert source.spec.engine_id in agent.runtime.agent.engines.engines


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda:0", "CUDA"), ("cuda", "CUDA"), ("meta", "no agent can open memory of meta")],
)
async def test_the_sdk_says_why_it_cannot_allocate_on_a_device(
    agent: PrefillAgent, device: str, words: str
) -> None:
    async with MemorySession(agent.attach, make_spec(), 0) as session:
        with pytest.raises(SegmentError, match=words):
            await session.allocate(NHD, num_blocks=4, device=device)


async def test_recording_is_for_ranks_with_cuda_memory(agent: PrefillAgent) -> None:
    async with MemorySession(agent.attach, make_spec(), 0) as session:
        with pytest.raises(LocalError, match="CUDA memory"):
            session.record()


async def test_an_engine_of_this_agent_is_none_the_worse(agent: PrefillAgent) -> None:
    async with engine(PrefillSession, agent.attach) as source:
        processes = list(agent.local(source).processes)
        async with greeted(agent) as client:
            await refusal(client)

        assert agent.local(source).ready
    await until(lambda: all(given_back(process) for process in processes))
