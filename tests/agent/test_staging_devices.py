"""The slots of an agent, device by device, and how those of a GPU are chosen."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvbus.agent import HOST, AgentConfig, SlotMemory, StagingDevices, convert_config, preferred
from kvbus.errors import ConfigError, LocalError, SegmentError
from kvbus.transport import Area, Transport, measure_wire

SETTINGS: dict[str, Any] = {
    "agent_id": "agent",
    "peer_bind": "tcp://127.0.0.1:0",
    "events_bind": "tcp://127.0.0.1:0",
    "staging_bytes": 3 * 4096,
    "slot_bytes": 4096,
}


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    """A transport that is started, and closed after the test."""
    made = Transport(f"prefill/{uuid.uuid4().hex}")
    await asyncio.wrap_future(made.start())
    yield made
    await asyncio.wrap_future(made.close(timeout_s=2.0))


def config(**changes: Any) -> AgentConfig:
    return convert_config(AgentConfig, SETTINGS | changes, source="the test")


@pytest.mark.anyio
async def test_the_host_has_slots_from_the_start_and_other_devices_have_not(
    transport: Transport,
) -> None:
    devices = await StagingDevices.open(config(), transport)
    with pytest.raises(LocalError, match="no staging slots for GPU-0"):
        devices.at("GPU-0")
    found = devices.at(HOST).num_slots, devices.num_slots, devices.slot_bytes, devices.packs
    known = devices.registrations({HOST, "GPU-0"}), devices.registrations({"GPU-0"})
    await devices.close()

    assert found == (3, 3, 4096, True)
    assert [len(registrations) for registrations in known] == [1, 0]
    assert transport.stats().registered_bytes == 0


@pytest.mark.anyio
async def test_each_device_is_registered_for_those_who_read_there(transport: Transport) -> None:
    devices = await StagingDevices.open(config(), transport)
    devices._slots["GPU-0"] = await SlotMemory.open(transport, num_slots=3, slot_bytes=4096)
    here, there = devices.registrations({HOST}), devices.registrations({"GPU-0"})
    both = devices.registrations({HOST, "GPU-0"})
    await devices.close()

    assert here != there
    assert both == [*here, *there]


@pytest.mark.anyio
async def test_where_packing_is_turned_off_no_device_has_slots(transport: Transport) -> None:
    devices = await StagingDevices.open(config(staging_bytes=0), transport)

    assert (devices.packs, devices.num_slots, devices.slot_bytes) == (False, 0, 0)
    assert devices.registrations({HOST}) == []
    for refused in (lambda: devices.at(HOST), devices.check_packs):
        with pytest.raises(ConfigError, match="'staging_bytes'"):
            refused()
    with pytest.raises(ConfigError, match="'staging_bytes'"):
        await devices.make("GPU-0")


@pytest.mark.anyio
async def test_a_gpu_that_is_not_there_has_no_slots(transport: Transport) -> None:
    devices = await StagingDevices.open(config(), transport)
    with pytest.raises(SegmentError, match=r"CUDA|GPU"):
        await devices.make("GPU-of-nobody")
    with pytest.raises(LocalError, match="no staging slots"):
        devices.at("GPU-of-nobody")
    await devices.close()


@pytest.mark.parametrize(
    ("vram", "pinned", "chosen"),
    [(2e9, 1e9, "VRAM"), (1e9, 2e9, "DRAM"), (0, 1e9, "DRAM"), (1e9, 0, "VRAM"), (0, 0, "VRAM")],
)
def test_slots_of_a_gpu_are_where_they_are_read_fastest(
    vram: float, pinned: float, chosen: str
) -> None:
    assert preferred({"VRAM": vram, "DRAM": pinned}) == chosen


def test_the_wire_between_two_areas_has_a_speed() -> None:
    rate = measure_wire(f"agent/{uuid.uuid4().hex}", Area.in_host(), Area.in_host(), timeout_s=30)

    assert 1e6 < rate < 1e13


def test_memory_that_nixl_does_not_take_has_no_speed() -> None:
    host = Area.in_host()
    nowhere = Area(0x1000, host.size_bytes, 0, "VRAM", host)

    with pytest.raises(SegmentError, match="NIXL cannot register"):
        measure_wire(f"agent/{uuid.uuid4().hex}", nowhere, nowhere, timeout_s=30)


@pytest.mark.anyio
async def test_where_nixl_takes_no_gpu_memory_the_slots_are_pinned_and_the_log_says_so(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.agent.staging.gpu._ordinal", lambda _gpu: 3)
    monkeypatch.setattr("kvbus.agent.staging.gpu._make", lambda size, *_: HostSlots(size))
    devices = await StagingDevices.open(config(), transport)
    with capture_logs() as logs:
        for _ in range(2):
            await devices.make("GPU-0")
    slots = devices.at("GPU-0")
    shape = slots.memory, slots.device, slots.num_slots, slots.slot_bytes
    await devices.close()

    (placed,) = (line for line in logs if line["event"] == "staging.placed")
    assert shape == ("DRAM", 0, 3, 4096)
    assert (placed["gpu"], placed["memory"], placed["vram_bytes_per_s"]) == ("GPU-0", "DRAM", 0)
    assert placed["pinned_bytes_per_s"] > 1e6
    assert [line["memory"] for line in logs if line["event"] == "staging.unmeasured"] == ["VRAM"]
    assert transport.stats().registered_bytes == 0


class HostSlots:
    """Ordinary memory, which NIXL takes as the host's but not as a GPU's."""

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.ones(size_bytes, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def close(self) -> None:
        """It goes by itself."""
