"""The staging slots of an agent, on each device that KV memory is on, registered with NIXL.

Who uses which slot is the service's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import numpy.typing as npt
import structlog

from kvbus.agent.config import AgentConfig
from kvbus.agent.loop import in_thread
from kvbus.errors import ConfigError, ErrorCode, GeometryError, LocalError, SegmentError
from kvbus.memory.mapping import OwnedMemory
from kvbus.memory.nvidia import check_has_gpu
from kvbus.memory.room import check_memory
from kvbus.transport import MemoryKind, Registration, Transport

if TYPE_CHECKING:
    from kvbus.memory.cuda import GpuSlots

log = structlog.get_logger()

HOST = "host"
"""All memory that is not a GPU's; GPUs are known by their UUIDs."""


class HostSlots(OwnedMemory):
    """Zeros of this process alone, all reserved. Raises `SegmentError`.

    Most kernels give private memory huge pages, of which a READ has fewer to look up: within a
    machine it takes half as long.
    """

    def __init__(self, size_bytes: int) -> None:
        check_memory(size_bytes)
        try:
            self._memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            message = f"cannot reserve {size_bytes} bytes of staging: {error.strerror}"
            raise SegmentError(message, size_bytes=size_bytes) from error
        self.size_bytes, self.closed = size_bytes, False
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._bytes[:] = 0  # every page is there from now on
        self.address: int = self._bytes.ctypes.data

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes."""
        return self._bytes

    def close(self) -> None:
        """Give the memory back; idempotent. The addresses stay, for a READ that has not ended."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self.closed = True


class SlotMemory:
    """Slots 0 to ``num_slots`` - 1 of ``slot_bytes`` each, one behind the other."""

    def __init__(
        self, storage: HostSlots | GpuSlots, registration: Registration, *, slot_bytes: int
    ) -> None:
        self.registration, self.slot_bytes = registration, slot_bytes
        self.num_slots = registration.size_bytes // slot_bytes
        self.memory: MemoryKind = registration.memory
        self.device = registration.device
        self.storage = storage

    def address(self, slot: int) -> int:
        """Where slot number ``slot`` begins in this process."""
        if not 0 <= slot < self.num_slots:
            raise GeometryError(f"slot {slot} of {self.num_slots} slots", slot=slot)
        return self.storage.address + slot * self.slot_bytes

    def view(self, slot: int) -> Any:
        """The bytes of slot number ``slot``: one row of uint8, of numpy or, on a GPU, of torch."""
        offset_bytes = self.address(slot) - self.storage.address
        return self.storage.view()[offset_bytes : offset_bytes + self.slot_bytes]

    def wipe(self, slot: int) -> None:
        """Write zeros over slot number ``slot``; call it in the thread that copies."""
        content = self.view(slot)
        content[:] = 0
        content[0].item()  # waits for a GPU


class StagingDevices:
    """The slots of an agent, device by device: the host's from the start, a GPU's once it is used.

    All have ``num_slots`` slots of ``slot_bytes``; both are 0 when packing is turned off. With
    ``only`` they are all that NIXL is told of: the engines' own memory is not registered.
    """

    def __init__(
        self, transport: Transport, *, num_slots: int, slot_bytes: int, only: bool
    ) -> None:
        self.only = only
        self.num_slots, self.slot_bytes = num_slots, slot_bytes if num_slots else 0
        self._transport = transport
        self._slots: dict[str, SlotMemory] = {}
        self._lock = anyio.Lock()

    @classmethod
    async def open(cls, config: AgentConfig, transport: Transport) -> StagingDevices:
        """What the configuration asks for, with the host's slots made and registered.

        Raises `SegmentError`.
        """
        num_slots, only = config.staging_bytes // config.slot_bytes, config.exposure == "staging"
        devices = cls(transport, num_slots=num_slots, slot_bytes=config.slot_bytes, only=only)
        if num_slots:
            try:
                host = await in_thread(partial(HostSlots, num_slots * config.slot_bytes))
            except SegmentError as error:
                message = f"key 'staging_bytes': {error.message}"
                raise SegmentError(message, code=error.code, **error.detail) from error
            devices._slots[HOST] = await devices._registered(host)
        return devices

    @property
    def packs(self) -> bool:
        return self.num_slots > 0

    def check_packs(self) -> None:
        """Raise `ConfigError` when the configuration turned packing off."""
        if not self.packs:
            raise ConfigError(
                "this agent packs nothing: key 'staging_bytes' of its configuration is 0",
                key="staging_bytes",
            )

    def at(self, device: str) -> SlotMemory:
        """The slots of a device; raises `LocalError` when it has none."""
        slots = self._slots.get(device)
        if slots is None:
            self.check_packs()
            raise LocalError(f"no staging slots for {device}", code=ErrorCode.INTERNAL)
        return slots

    def registrations(self, devices: set[str]) -> list[Registration]:
        """What peers have to know of to read slots of these devices; nothing without slots."""
        return [slots.registration for name, slots in self._slots.items() if name in devices]

    async def make(self, gpu: str) -> None:
        """Have slots for a GPU that this process sees, made by the first who asks.

        Raises `SegmentError`, `ConfigError`.
        """
        self.check_packs()
        async with self._lock:
            if gpu not in self._slots:
                self._slots[gpu] = await self._of_gpu(gpu)

    def close(self) -> None:
        """Give the memory back, when the transport is closed and nothing copies any more."""
        for slots in self._slots.values():
            slots.storage.close()

    # A NIC reads the GPU's own memory by itself. Without one UCX copies from there in pieces, in
    # this process, and pinned memory of the host is filled faster by the GPU. What NIXL refuses to
    # register gives way to the other.
    async def _of_gpu(self, gpu: str) -> SlotMemory:
        """Slots in the GPU's memory, or in pinned memory of the host; raises `SegmentError`."""
        kinds: tuple[MemoryKind, MemoryKind] = ("VRAM", "DRAM")
        size_bytes = self.num_slots * self.slot_bytes
        for memory in kinds if self._transport.nic_writes else reversed(kinds):
            try:
                storage, ordinal = await in_thread(partial(_gpu_memory, gpu, size_bytes, memory))
                device = ordinal if memory == "VRAM" else 0
                slots = await self._registered(storage, device=device, memory=memory)
            except SegmentError as error:
                refused = error
                log.warning("staging.refused", gpu=gpu, memory=memory, reason=error.message)
            else:
                log.info("staging.placed", gpu=gpu, memory=memory)
                return slots
        raise refused

    async def _registered(
        self, storage: HostSlots | GpuSlots, *, device: int = 0, memory: MemoryKind = "DRAM"
    ) -> SlotMemory:
        """Register the memory, which is closed when NIXL refuses it: `SegmentError`."""
        size_bytes = self.num_slots * self.slot_bytes
        register = self._transport.register
        try:
            future = register(storage.address, size_bytes, device=device, memory=memory)
            registration = await asyncio.wrap_future(future)
        except BaseException:
            storage.close()
            raise
        return SlotMemory(storage, registration, slot_bytes=self.slot_bytes)


def _gpu_memory(gpu: str, size_bytes: int, memory: MemoryKind) -> tuple[GpuSlots, int]:
    ordinal = cuda().gpu_ordinal(gpu)
    return cuda().GpuSlots(size_bytes, ordinal, pinned=memory == "DRAM"), ordinal


def cuda() -> Any:
    """Return the package for memory of GPUs. Raises `SegmentError` where there is no GPU.

    Call it in a thread: it imports torch, which takes seconds and 120 MB.
    """
    check_has_gpu()
    from kvbus.memory import cuda as package  # noqa: PLC0415  # see above

    return package
