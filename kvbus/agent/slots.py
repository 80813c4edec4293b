"""The staging slots of an agent, on each device that KV memory is on, registered with NIXL.

Who uses which slot is the service's to say.
"""

import asyncio
from functools import partial
from typing import Any, Protocol, Self

import anyio
import structlog

from kvbus.agent.config import AgentConfig
from kvbus.agent.loop import in_thread
from kvbus.errors import ConfigError, ErrorCode, GeometryError, LocalError, SegmentError
from kvbus.memory.segment import SharedSegment
from kvbus.transport import MemoryKind, Registration, Transport

log = structlog.get_logger()

HOST = "host"
"""All memory that is not a GPU's; GPUs are known by their UUIDs."""


class SlotStorage(Protocol):
    """What the slots are cut from."""

    @property
    def address(self) -> int:
        """Where the first byte is in this process."""
        ...

    def view(self) -> Any:
        """All bytes, as one row of uint8: of numpy on the host, of torch on a GPU."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class SlotMemory:
    """Slots 0 to ``num_slots`` - 1 of ``slot_bytes`` each, one behind the other."""

    def __init__(
        self,
        segment: SlotStorage,
        registration: Registration,
        transport: Transport,
        *,
        slot_bytes: int,
    ) -> None:
        self.registration, self.slot_bytes = registration, slot_bytes
        self.num_slots = registration.size_bytes // slot_bytes
        self.memory: MemoryKind = registration.memory
        self.device = registration.device
        self._segment, self._transport = segment, transport

    @classmethod
    async def open(cls, transport: Transport, *, num_slots: int, slot_bytes: int) -> Self:
        """Slots of the host; raises `SegmentError`.

        Their pages are reserved, and come into this process when a slot is first used.
        """
        size_bytes = num_slots * slot_bytes
        try:
            segment = await in_thread(partial(SharedSegment, size_bytes, name="kvbus-staging"))
        except SegmentError as error:
            message = f"key 'staging_bytes': {error.message}"
            raise SegmentError(message, code=error.code, **error.detail) from error
        return await cls.over(segment, transport, size_bytes=size_bytes, slot_bytes=slot_bytes)

    @classmethod
    async def over(
        cls,
        segment: SlotStorage,
        transport: Transport,
        *,
        size_bytes: int,
        slot_bytes: int,
        device: int = 0,
        memory: MemoryKind = "DRAM",
    ) -> Self:
        """Register the memory, which is closed when NIXL refuses it: `SegmentError`."""
        try:
            future = transport.register(segment.address, size_bytes, device=device, memory=memory)
            registration = await asyncio.wrap_future(future)
        except BaseException:
            segment.close()
            raise
        return cls(segment, registration, transport, slot_bytes=slot_bytes)

    def address(self, slot: int) -> int:
        """Where slot number ``slot`` begins in this process."""
        if not 0 <= slot < self.num_slots:
            raise GeometryError(f"slot {slot} of {self.num_slots} slots", slot=slot)
        return self._segment.address + slot * self.slot_bytes

    def view(self, slot: int) -> Any:
        """The bytes of slot number ``slot``: one row of uint8, of numpy or, on a GPU, of torch."""
        offset_bytes = self.address(slot) - self._segment.address
        return self._segment.view()[offset_bytes : offset_bytes + self.slot_bytes]

    def wipe(self, slot: int) -> None:
        """Write zeros over slot number ``slot``; call it in the thread that copies."""
        content = self.view(slot)
        content[:] = 0
        content[0].item()  # waits for a GPU

    async def close(self) -> None:
        """Deregister, then give the memory back; nothing may copy into it or out of it any more.

        Raises `LocalError` (``busy``), and keeps it, while a transfer writes into it.
        """
        await asyncio.wrap_future(self._transport.deregister(self.registration))
        self._segment.close()


# A NIC reads the GPU's own memory by itself. Without one UCX copies from there in pieces, in this
# process, and pinned memory of the host is filled faster by the GPU.
async def open_gpu_slots(
    transport: Transport, gpu: str, *, num_slots: int, slot_bytes: int
) -> SlotMemory:
    """Slots in the GPU's memory, or in pinned memory of the host if no NIC reads those of peers.

    What NIXL refuses to register gives way to the other; raises `SegmentError` when it refuses
    both.
    """
    kinds: tuple[MemoryKind, MemoryKind] = ("VRAM", "DRAM")
    size_bytes = num_slots * slot_bytes
    for memory in kinds if transport.nic_writes else reversed(kinds):
        try:
            made, ordinal = await in_thread(partial(_gpu_memory, gpu, size_bytes, memory))
            slots = await SlotMemory.over(
                made,
                transport,
                size_bytes=size_bytes,
                slot_bytes=slot_bytes,
                device=ordinal if memory == "VRAM" else 0,
                memory=memory,
            )
        except SegmentError as error:
            refused = error
            log.warning("staging.refused", gpu=gpu, memory=memory, reason=error.message)
        else:
            log.info("staging.placed", gpu=gpu, memory=memory)
            return slots
    raise refused


def _gpu_memory(gpu: str, size_bytes: int, memory: MemoryKind) -> tuple[SlotStorage, int]:
    from kvbus.memory.cuda import GpuSlots, gpu_ordinal  # noqa: PLC0415  # imports torch: seconds

    ordinal = gpu_ordinal(gpu)
    return GpuSlots(size_bytes, ordinal, pinned=memory == "DRAM"), ordinal


class StagingDevices:
    """The slots of an agent, device by device: the host's from the start, a GPU's once it is used.

    All have ``num_slots`` slots of ``slot_bytes``; both are 0 when packing is turned off. With
    ``only`` they are all that NIXL is told of: the engines' own memory is not registered.
    """

    def __init__(
        self, transport: Transport, *, num_slots: int, slot_bytes: int, only: bool = False
    ) -> None:
        self.only = only
        self.num_slots, self.slot_bytes = num_slots, slot_bytes if num_slots else 0
        self._transport = transport
        self._slots: dict[str, SlotMemory] = {}
        self._lock = anyio.Lock()

    @classmethod
    async def open(cls, config: AgentConfig, transport: Transport) -> "StagingDevices":
        """What the configuration asks for, with the host's slots made and registered.

        Raises `SegmentError`.
        """
        num_slots = config.staging_bytes // config.slot_bytes
        devices = cls(
            transport,
            num_slots=num_slots,
            slot_bytes=config.slot_bytes,
            only=config.exposure == "staging",
        )
        if num_slots:
            devices._slots[HOST] = await SlotMemory.open(
                transport, num_slots=num_slots, slot_bytes=config.slot_bytes
            )
        return devices

    @property
    def packs(self) -> bool:
        """Whether there are slots at all."""
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
                self._slots[gpu] = await open_gpu_slots(
                    self._transport, gpu, num_slots=self.num_slots, slot_bytes=self.slot_bytes
                )

    async def close(self) -> None:
        """Deregister and give back all; nothing may copy into it or out of it any more."""
        for device in list(self._slots):
            await self._slots.pop(device).close()
