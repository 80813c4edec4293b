"""The slots of an agent, device by device, and how those of a GPU are chosen."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbus.agent.config import AgentConfig, convert_config
from kvbus.agent.slots import HOST, HostSlots, StagingDevices
from kvbus.errors import ConfigError, LocalError, SegmentError
from kvbus.memory.segment import huge_bytes
from kvbus.transport import Transport

NUM_SLOTS, SLOT_BYTES = 3, 4096
SETTINGS: dict[str, Any] = {
    "agent_id": "agent",
    "peer_bind": "tcp://127.0.0.1:0",
    "events_bind": "tcp://127.0.0.1:0",
    "staging_bytes": NUM_SLOTS * SLOT_BYTES,
    "slot_bytes": SLOT_BYTES,
}


Made = tuple[Transport, StagingDevices]


@pytest.fixture
async def made() -> AsyncIterator[Made]:
    transport = Transport(f"prefill/{uuid.uuid4().hex}")
    await asyncio.wrap_future(transport.start())
    devices = await StagingDevices.open(config(), transport)
    yield transport, devices
    await asyncio.wrap_future(transport.close(timeout_s=2.0))
    devices.close()


def config(**changes: Any) -> AgentConfig:
    return convert_config(AgentConfig, SETTINGS | changes, source="the test")


@pytest.mark.anyio
async def test_the_host_has_slots_from_the_start_and_a_gpu_that_is_not_there_has_none(
    made: Made,
) -> None:
    _, devices = made
    with pytest.raises(SegmentError, match=r"CUDA|GPU"):
        await devices.make("GPU-0")
    with pytest.raises(LocalError, match="no staging slots for GPU-0"):
        devices.at("GPU-0")
    found = devices.at(HOST).num_slots, devices.num_slots, devices.slot_bytes, devices.packs
    known = devices.registrations({HOST, "GPU-0"}), devices.registrations({"GPU-0"})

    assert found == (NUM_SLOTS, NUM_SLOTS, SLOT_BYTES, True)
    assert [len(registrations) for registrations in known] == [1, 0]


def test_slots_of_the_host_have_huge_pages_if_there_are_any_and_read_zeros_once_closed() -> None:
    words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    with HostSlots(16 << 20) as slots:
        in_huge_pages = huge_bytes(slots.address)
        content = slots.view()
        content[:] = 1

    assert (in_huge_pages >= 8 << 20) == ("[never]" not in words)
    assert not content.any()


def test_staging_memory_smaller_than_a_slot_is_refused_with_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"'staging_bytes': 1024 .* 'slot_bytes' = 4096"):
        config(staging_bytes=1024)


@pytest.mark.anyio
@pytest.mark.parametrize(("nic_writes", "refused"), [(True, ["VRAM"]), (False, [])])
async def test_slots_of_a_gpu_are_in_its_memory_if_a_nic_reads_and_nixl_takes_it_else_pinned(
    made: Made, monkeypatch: pytest.MonkeyPatch, nic_writes: bool, refused: list[str]
) -> None:
    monkeypatch.setattr(
        "kvbus.agent.slots._gpu_memory", lambda _gpu, size, _memory: (HostSlots(size), 3)
    )
    transport, devices = made
    transport.nic_writes = nic_writes
    with capture_logs() as logs:
        for _ in range(2):
            await devices.make("GPU-0")
    slots = devices.at("GPU-0")
    shape = slots.memory, slots.device, slots.num_slots, slots.slot_bytes
    here, there = devices.registrations({HOST}), devices.registrations({"GPU-0"})
    both = devices.registrations({HOST, "GPU-0"})

    (placed,) = (line for line in logs if line["event"] == "staging.placed")
    assert shape == ("DRAM", 0, NUM_SLOTS, SLOT_BYTES)
    assert here != there
    assert both == [*here, *there]
    assert (placed["gpu"], placed["memory"]) == ("GPU-0", "DRAM")
    assert [line["memory"] for line in logs if line["event"] == "staging.refused"] == refused
