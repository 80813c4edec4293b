"""Owns the staging memory of an agent: cut into slots, registered with NIXL, given back at the end.

Who uses which slot is the service's to say. The bytes of a slot are a uint8 tensor, which is only
passed on here: `kvbus.memory` knows what to do with it.
"""

import asyncio
from typing import Any, Protocol, Self

from kvbus.agent.process.loop import in_thread
from kvbus.errors import GeometryError, SegmentError
from kvbus.memory.segment import SharedSegment
from kvbus.transport import MemoryKind, Registration, Transport


class SlotStorage(Protocol):
    """What the slots are cut from."""

    @property
    def address(self) -> int:
        """Where the first byte is in this process."""
        ...

    @property
    def tensor(self) -> Any:
        """All bytes, as a uint8 tensor."""
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
        """Make and register the memory; raises `SegmentError`.

        Its pages are reserved, and come into this process when a slot is first used.
        """
        size_bytes = num_slots * slot_bytes
        segment = await in_thread(_make, size_bytes)
        try:
            future = transport.register(segment.address, size_bytes)
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

    def tensor(self, slot: int) -> Any:
        """The bytes of slot number ``slot``: a contiguous uint8 torch tensor.

        Imports torch, which takes seconds the first time: call it in the thread that copies.
        """
        offset_bytes = self.address(slot) - self._segment.address
        return self._segment.tensor[offset_bytes : offset_bytes + self.slot_bytes]

    def wipe(self, slot: int) -> None:
        """Write zeros over slot number ``slot``; call it in the thread that copies."""
        self.tensor(slot).zero_()[0].item()  # reading one back waits for a GPU

    async def close(self) -> None:
        """Deregister, then give the memory back; nothing may copy into it or out of it any more.

        Raises `LocalError` (``busy``), and keeps it, while a transfer writes into it.
        """
        await asyncio.wrap_future(self._transport.deregister(self.registration))
        self.unmap()

    def unmap(self) -> None:
        """Give the memory back once the transport, closed without handles left, let go of it."""
        self._segment.close()


def _make(size_bytes: int) -> SharedSegment:
    try:
        return SharedSegment(size_bytes, name="kvbus-staging")
    except SegmentError as error:
        raise SegmentError(
            f"key 'staging_bytes': {error.message}", code=error.code, **error.detail
        ) from error
