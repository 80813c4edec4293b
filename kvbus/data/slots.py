"""Staging slots on one device: memory of this process, registered with NIXL."""

from kvbus.data.messages import HOST, MemoryKind
from kvbus.data.nixl import Registration
from kvbus.errors import GeometryError, SegmentError
from kvbus.memory.copying import ByteRange
from kvbus.memory.cuda import PinnedMemory, VramMemory, gpu_ordinal, taken_bytes
from kvbus.memory.host_memory import HostMemory

Storage = HostMemory | PinnedMemory | VramMemory


class Slots:
    def __init__(self, storage: Storage, registration: Registration, slot_bytes: int) -> None:
        self.storage, self.registration, self.slot_bytes = storage, registration, slot_bytes
        self.num_slots = registration.size_bytes // slot_bytes
        self.memory: MemoryKind = registration.memory
        self.device = registration.device
        self.refused: SegmentError | None = None
        self.gpu_bytes: int | None = None
        """Memory that the process has taken of the GPU, as far as known."""

    def address(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise GeometryError(f"slot {slot} of {self.num_slots} slots", slot=slot)
        return self.storage.address + slot * self.slot_bytes

    def place(self, slot: int) -> ByteRange:
        return ByteRange(self.address(slot), self.slot_bytes)

    def wipe(self, slot: int) -> int:
        self.storage.zero(self.address(slot) - self.storage.address, self.slot_bytes)
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
    if device == HOST:
        storage = HostMemory(size_bytes)
        return Slots(storage, Registration(storage.address, size_bytes, 0, kind), slot_bytes)
    return _allocate_for_gpu(device, kind, size_bytes, slot_bytes)


def _allocate_for_gpu(gpu: str, kind: MemoryKind, size_bytes: int, slot_bytes: int) -> Slots:
    taken_bytes(gpu)  # before the first context
    ordinal = gpu_ordinal(gpu)
    storage = (PinnedMemory if kind == "DRAM" else VramMemory)(size_bytes, ordinal)
    nixl_device = ordinal if kind == "VRAM" else 0
    registration = Registration(storage.address, size_bytes, nixl_device, kind)
    slots = Slots(storage, registration, slot_bytes)
    slots.gpu_bytes = taken_bytes(gpu)
    return slots
