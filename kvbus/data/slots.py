"""Staging slots on one device: memory of this process, registered with NIXL."""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvbus.data.messages import HOST, MemoryKind
from kvbus.data.nixl import Registration
from kvbus.errors import GeometryError, SegmentError
from kvbus.memory.memory_limits import check_memory
from kvbus.memory.nvidia import check_has_gpu

if TYPE_CHECKING:
    from kvbus.memory.cuda import GpuSlots


class HostSlots:
    """Raises `SegmentError`. Huge pages halve the time of a READ within a machine."""

    def __init__(self, size_bytes: int) -> None:
        check_memory(size_bytes)
        try:
            memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            message = f"cannot allocate {size_bytes} bytes of staging slots: {error.strerror}"
            raise SegmentError(message, size_bytes=size_bytes) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._bytes[:] = 0  # touches every page now
        self.address: int = self._bytes.ctypes.data

    def view(self) -> npt.NDArray[np.uint8]:
        return self._bytes


class Slots:
    def __init__(
        self, storage: HostSlots | GpuSlots, registration: Registration, slot_bytes: int
    ) -> None:
        self.storage, self.registration, self.slot_bytes = storage, registration, slot_bytes
        self.num_slots = registration.size_bytes // slot_bytes
        self.memory: MemoryKind = registration.memory
        self.device = registration.device
        self.refused: SegmentError | None = None

    def address(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise GeometryError(f"slot {slot} of {self.num_slots} slots", slot=slot)
        return self.storage.address + slot * self.slot_bytes

    def view(self, slot: int) -> Any:
        """Return one row of uint8, of numpy or, on a GPU, of torch."""
        offset_bytes = self.address(slot) - self.storage.address
        return self.storage.view()[offset_bytes : offset_bytes + self.slot_bytes]

    def wipe(self, slot: int) -> int:
        content = self.view(slot)
        content[:] = 0
        content[0].item()  # waits for a GPU
        return self.slot_bytes


# A NIC reads the GPU's memory directly. Without one, UCX copies from there in pieces, in this
# process; the GPU fills pinned host memory faster.
def kinds_of_slots(device: str, *, nic_reads_gpu: bool) -> tuple[MemoryKind, ...]:
    """The best kind comes first."""
    if device == HOST:
        return ("DRAM",)
    return ("VRAM", "DRAM") if nic_reads_gpu else ("DRAM", "VRAM")


def allocate_slots(device: str, kind: MemoryKind, num_slots: int, slot_bytes: int) -> Slots:
    """Call it in a thread: it can take seconds. Raises `SegmentError`."""
    size_bytes = num_slots * slot_bytes
    if size_bytes <= 0:
        raise SegmentError(f"{num_slots} staging slots of {slot_bytes} bytes", device=device)
    storage: HostSlots | GpuSlots
    nixl_device = 0
    if device == HOST:
        storage = HostSlots(size_bytes)
    else:
        ordinal = cuda().gpu_ordinal(device)
        storage = cuda().GpuSlots(size_bytes, ordinal, pinned=kind == "DRAM")
        nixl_device = ordinal if kind == "VRAM" else 0
    registration = Registration(storage.address, size_bytes, nixl_device, kind)
    return Slots(storage, registration, slot_bytes)


def cuda() -> Any:
    """Call it in a thread: it imports torch, which takes seconds and 120 MB."""
    check_has_gpu()
    from kvbus.memory import cuda as package  # noqa: PLC0415  # see above

    return package
