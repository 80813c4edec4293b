"""Memory of this process that GPUs copy to and from. Raises `SegmentError`."""

import weakref
from collections.abc import Callable

from kvbus.errors import SegmentError
from kvbus.memory.cuda import driver
from kvbus.memory.host_memory import HostMemory


def pin_for(owner: object, address: int, size_bytes: int, *, ordinal: int) -> Callable[[], object]:
    """Give all GPUs of this process access to host memory while ``owner`` lives.

    Return a function that unpins it earlier. Raises `SegmentError`.
    """
    with driver.on_gpu(ordinal):
        found = driver.pin(address, size_bytes)
    unpin = weakref.finalize(owner, _unpin, ordinal, address)
    unpin.atexit = False
    if found != address:
        raise SegmentError(f"GPU {ordinal} has another address for pinned host memory")
    return unpin


class PinnedMemory(HostMemory):
    """Host memory that every GPU of this process can access; unpinned when it is collected."""

    def __init__(self, size_bytes: int, ordinal: int) -> None:
        super().__init__(size_bytes)
        pin_for(self, self.address, size_bytes, ordinal=ordinal)


class VramMemory:
    """Zeroed memory on a GPU, freed when it is collected."""

    def __init__(self, size_bytes: int, ordinal: int) -> None:
        self.ordinal = ordinal
        with driver.on_gpu(ordinal):
            self.address = driver.allocate(size_bytes)
        weakref.finalize(self, _free, ordinal, self.address).atexit = False
        self.zero(0, size_bytes)

    def zero(self, offset_bytes: int, size_bytes: int) -> None:
        with driver.on_gpu(self.ordinal):
            driver.zero_async(self.address + offset_bytes, size_bytes, stream=0)
            driver.synchronize(stream=0)


def _unpin(ordinal: int, address: int) -> None:
    with driver.on_gpu(ordinal):
        driver.unpin(address)


def _free(ordinal: int, address: int) -> None:
    with driver.on_gpu(ordinal):
        driver.free(address)
