"""Makes the staging slots of one GPU, in the memory that NIXL reads fastest.

Both kinds are measured when the slots are made, and the log says the result.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kvbus.agent.process.loop import in_thread
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.errors import KVBusError
from kvbus.transport import MemoryKind, Transport
from kvbus.transport.bare_pair import LONG_BYTES, NUM_PLACES
from kvbus.transport.calibration import Area, measure_wire

if TYPE_CHECKING:
    from kvbus.memory.gpus import GpuSlots

log = structlog.get_logger()

KINDS: tuple[MemoryKind, ...] = ("VRAM", "DRAM")


async def open_gpu_slots(
    transport: Transport, gpu: str, *, num_slots: int, slot_bytes: int
) -> SlotMemory:
    """The slots, registered; raises `SegmentError` when NIXL registers neither kind of memory."""
    ordinal = await in_thread(_ordinal, gpu)
    rates: dict[MemoryKind, float] = {}
    for kind in KINDS:
        measure = partial(_rate, transport.name, kind, ordinal)
        rates[kind] = await in_thread(measure)
    memory = preferred(rates)
    size_bytes = num_slots * slot_bytes
    slots = await in_thread(partial(_make, size_bytes, memory, ordinal))
    try:
        future = transport.register(
            slots.address, size_bytes, device=_device(memory, ordinal), memory=memory
        )
        registration = await asyncio.wrap_future(future)
    except BaseException:
        slots.close()
        raise
    log.info(
        "staging.placed",
        gpu=gpu,
        memory=memory,
        vram_bytes_per_s=round(rates["VRAM"]),
        pinned_bytes_per_s=round(rates["DRAM"]),
    )
    return SlotMemory(slots, registration, transport, slot_bytes=slot_bytes)


def preferred(rates: dict[MemoryKind, float]) -> MemoryKind:
    """The GPU's own memory, unless pinned host memory was read faster; 0 stands for not at all."""
    return "DRAM" if rates["DRAM"] > rates["VRAM"] else "VRAM"


def _ordinal(gpu: str) -> int:
    from kvbus.memory.gpus import gpu_ordinal  # noqa: PLC0415  # imports torch: seconds

    return gpu_ordinal(gpu)


def _make(size_bytes: int, memory: MemoryKind, ordinal: int) -> "GpuSlots":
    from kvbus.memory.gpus import GpuSlots  # noqa: PLC0415  # imports torch: seconds

    return GpuSlots(size_bytes, ordinal, pinned=memory == "DRAM")


def _device(memory: MemoryKind, ordinal: int) -> int:
    return ordinal if memory == "VRAM" else 0


def _rate(name: str, memory: MemoryKind, ordinal: int) -> float:
    """Bytes per second from such memory into such memory; 0 where NIXL cannot."""
    size_bytes = NUM_PLACES * LONG_BYTES
    try:
        made = [_make(size_bytes, memory, ordinal) for _ in range(2)]
        device = _device(memory, ordinal)
        areas = [Area(one.address, size_bytes, device, memory, one) for one in made]
        return measure_wire(f"{name}/{memory}", *areas)
    except KVBusError as error:
        log.warning("staging.unmeasured", memory=memory, code=error.code, reason=error.message)
        return 0.0
