"""Private memory of this process for staging slots."""

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from kvbus.errors import SegmentError
from kvbus.memory.memory_limits import check_memory


class HostMemory:
    """Zeroed, with every page touched. Raises `SegmentError`.

    Huge pages halve the time of a READ within a machine.
    """

    def __init__(self, size_bytes: int) -> None:
        check_memory(size_bytes)
        try:
            memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            message = f"cannot allocate {size_bytes} bytes of staging slots: {error.strerror}"
            raise SegmentError(message, size_bytes=size_bytes) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.bytes[:] = 0
        self.address: int = self.bytes.ctypes.data

    def zero(self, offset_bytes: int, size_bytes: int) -> None:
        self.bytes[offset_bytes : offset_bytes + size_bytes] = 0
