"""An engine's GPU memory for other processes.

Memory of cuMemAlloc and cudaMalloc has a legacy IPC handle. Memory that is mapped in parts
(cuMemCreate: expandable segments, allocators of sleep modes) has a POSIX descriptor for each part.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvbus.errors import SegmentError
from kvbus.memory.cuda import driver
from kvbus.memory.cuda.gpus import check_ordinal, gpu_uuid
from kvbus.memory.cuda.slots import VramMemory
from kvbus.memory.gpu_source import GpuSource

ADVICE = (
    "Start the engine with PYTORCH_CUDA_ALLOC_CONF=backend:native; memory that is mapped in parts "
    "needs handles of type CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
)


Exported = tuple[GpuSource, list[int]]
"""A source, and the descriptors of its parts."""


class GpuMemory:
    """An engine's own GPU memory at ``address``. Raises `SegmentError` if it cannot be shared.

    The engine must not free it while an agent has it.
    """

    def __init__(self, ordinal: int, address: int, size_bytes: int) -> None:
        check_ordinal(ordinal)
        self.ordinal, self.address, self.size_bytes = ordinal, address, size_bytes
        self.device = gpu_uuid(ordinal)
        with self.exported():
            pass

    def close(self) -> None:
        """Do nothing: the engine frees it."""

    @contextmanager
    def exported(self) -> Iterator[Exported]:
        """Export the memory that is at the address now; close the descriptors at the end."""
        with driver.on_gpu(self.ordinal):
            found = self._export()
        try:
            yield found
        finally:
            for fd in found[1]:
                os.close(fd)

    def _export(self) -> Exported:
        try:
            handle = driver.retain_part(self.address)
            if handle is None:
                return self._export_whole()
            driver.release_part(handle)
            return self._export_parts()
        except SegmentError as error:
            raise SegmentError(
                f"{self.size_bytes} bytes of GPU {self.device} cannot be opened by another process:"
                f" {error.message}. {ADVICE}",
                size_bytes=self.size_bytes,
            ) from error

    def _export_whole(self) -> Exported:
        allocation = driver.allocation_of(self.address)
        if allocation is None:
            raise SegmentError("CUDA does not know the allocation")
        base, size_bytes = allocation
        if self.address + self.size_bytes > base + size_bytes:
            raise SegmentError("it is not of one allocation")
        handle = driver.export_handle(base)
        return GpuSource(self.device, self.address - base, handle), []

    def _export_parts(self) -> Exported:
        at = first = _mapping_of(self.address)[0]
        end, sizes, fds = self.address + self.size_bytes, list[int](), list[int]()
        try:
            while at < end:
                fds.append(_export_part(at))
                sizes.append(_mapping_of(at)[1])
                at += sizes[-1]
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return GpuSource(self.device, self.address - first, parts=tuple(sizes)), fds


def _export_part(address: int) -> int:
    handle = driver.retain_part(address)
    if handle is None:
        raise SegmentError("a part of it is not mapped")
    try:
        if not driver.handle_types_of(handle) & driver.POSIX_DESCRIPTOR:
            raise SegmentError("its allocator requested no handle type")
        return driver.export_part(handle)
    finally:
        driver.release_part(handle)


def _mapping_of(address: int) -> tuple[int, int]:
    base = driver.pointer_attribute(driver.MAPPING_BASE, address)
    size_bytes = driver.pointer_attribute(driver.MAPPING_SIZE, address)
    found = (base, size_bytes) if base and size_bytes else driver.allocation_of(address)
    if found is None:
        raise SegmentError("CUDA does not know how its parts are mapped")
    return found


class GpuAllocation(VramMemory):
    """Zeroed memory on a GPU, which an agent can open. Raises `SegmentError`.

    torch makes views by its array interface, which keep it alive. CUDA frees it with the last one.
    """

    def __init__(self, size_bytes: int, ordinal: int) -> None:
        check_ordinal(ordinal)
        try:
            super().__init__(size_bytes, ordinal)
        except SegmentError as error:
            raise SegmentError(
                f"cannot allocate {size_bytes} bytes on cuda:{ordinal}: {error.message}",
                size_bytes=size_bytes,
            ) from error
        self.size_bytes = size_bytes
        self.memory = GpuMemory(ordinal, self.address, size_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size_bytes,),
            "strides": None,
            "data": (self.address, False),
        }

    def close(self) -> None:
        """Do nothing: CUDA frees it with its last view."""
