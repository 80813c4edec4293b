"""Slots for a GPU lie in its memory only if NIXL reads it without emulation.

A fake GPU has no NIC: without CUDA IPC, UCX emulates.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import structlog

from kvbus.agent.probe import measure_vram_read
from kvbus.agent.staging_devices import StagingDevices
from kvbus.data.child import spawner
from kvbus.data.client import DataProcess
from tests.support import cuda as fake
from tests.support.cuda.apart import apart

GPU, SLOT_BYTES, NUM_SLOTS = fake.uuid(0), 1 << 20, 4
Lines = list[MutableMapping[str, Any]]


@asynccontextmanager
async def data_process() -> AsyncIterator[DataProcess]:
    data = DataProcess(
        spawner(asyncio.get_running_loop()),
        new_boot=lambda: uuid.uuid4().hex,
        name="slots",
        slice_bytes=SLOT_BYTES,
        copy_threads=1,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(data.run)
        await data.until_running()
        yield data
        await data.close()


async def _place(**options: Any) -> Lines:
    async with data_process() as data:
        staging = StagingDevices(
            data, staging_bytes=NUM_SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES, only=False, **options
        )
        with structlog.testing.capture_logs() as lines:
            await staging.make(GPU)
        return lines


def _slots(**options: Any) -> tuple[str, dict[str, MutableMapping[str, Any]]]:
    os.environ["UCX_NET_DEVICES"] = "lo"
    lines = anyio.run(partial(_place, **options))
    (placed,) = (line for line in lines if line["event"] == "staging.placed")
    return placed["memory"], {line["event"]: line for line in lines}


@apart(only_fake=True)
def test_slots_lie_on_a_gpu_that_is_read_without_emulation() -> None:
    over_ipc = partial(measure_vram_read, over_ipc=True)

    memory, logged = _slots(nic_reads_gpu=True, measure_read=over_ipc)

    assert memory == "VRAM"
    assert logged["staging.read"]["wire"] == "cuda_ipc/cuda"
    assert logged["staging.read"]["bytes_per_s"] > 1e6
    assert logged["staging.placed"]["gpu_bytes"] >= NUM_SLOTS * SLOT_BYTES


@apart(only_fake=True)
def test_slots_are_pinned_host_memory_where_reads_are_emulated() -> None:
    memory, logged = _slots(nic_reads_gpu=True)

    assert memory == "DRAM"
    assert logged["staging.emulated"]["log_level"] == "warning"
    assert logged["staging.emulated"]["wire"] == "tcp/lo"
    assert "nvidia_peermem" in logged["staging.emulated"]["do"]


@apart(only_fake=True, faults="no_handle")
def test_slots_are_pinned_host_memory_where_reads_fail() -> None:
    over_ipc = partial(measure_vram_read, over_ipc=True)

    memory, logged = _slots(nic_reads_gpu=True, measure_read=over_ipc)

    assert memory == "DRAM"
    assert "cuIpcGetMemHandle" in logged["staging.unreadable"]["reason"]


@apart(only_fake=True)
def test_no_read_is_measured_without_nic_or_for_slots_on_gpu() -> None:
    async def never(_gpu: str) -> Any:
        raise AssertionError("a READ was measured")

    memory, _ = _slots(measure_read=never)
    wanted, _ = _slots(on_gpu=True, measure_read=never)

    assert (memory, wanted) == ("DRAM", "VRAM")
