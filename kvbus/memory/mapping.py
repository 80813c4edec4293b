"""Owns the agent's mapping of a segment that an engine passed as a file descriptor.

Refuses to trust the engine: the file must be a memory file of exactly the claimed size, it is
sealed against truncation where the kernel allows that, and its pages are reserved before use.
"""

import fcntl
import os
import stat
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvbus.errors import ClosedError, SegmentError
from kvbus.memory import libc
from kvbus.memory.bus_errors import BusErrors, OnCut
from kvbus.memory.pages import MappedFile, Pages
from kvbus.memory.room import check_mappings, check_memory

_POPULATE_WITHIN_S = 2.0  # an engine waits for it while it registers
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}


class SegmentMapping(MappedFile):
    """An engine's segment, mapped here; ``discarded`` once its bytes are gone from here.

    Takes over ``fd`` and closes it, also when it raises. ``sealed`` is False when the engine can
    still truncate the file (torch's shared storage cannot be sealed): then the next access here is
    SIGBUS, which `survive_cuts` is for. Enters the pages into the page table, so that no read has
    to, for two seconds at most, and takes longer when the engine left pages unreserved: an event
    loop calls it in a thread.
    Raises ``SegmentError``.
    """

    def __init__(self, fd: int, *, size_bytes: int) -> None:
        self.discarded = False
        self._unwatch: Callable[[], None] = _nothing
        self.size_bytes = size_bytes
        try:
            check_mappings()
            self.sealed = _seal_against_shrinking(fd)
            _check_file(fd, size_bytes)
            _reserve_holes(fd, size_bytes)
            self._pages = Pages(fd, size_bytes)
            self._pages.populate(_POPULATE_WITHIN_S)
        except OSError as error:
            raise SegmentError(
                f"cannot map the engine's segment of {size_bytes} bytes: {error.strerror}; "
                "its descriptor must be open for reading and writing, and memory be free",
                size_bytes=size_bytes,
            ) from error
        finally:
            os.close(fd)

    def survive_cuts(self, bus_errors: BusErrors, on_cut: OnCut) -> None:
        """Have this process live when the engine truncates the file; ``on_cut`` is told of it.

        Zeros take the place of all of the segment then, as after `discard`.
        """
        pages = self._mapped()
        bus_errors.watch(pages.address, pages.length_bytes, on_cut)
        self._unwatch = partial(bus_errors.unwatch, pages.address)

    def view(self) -> npt.NDArray[np.uint8]:
        """As every mapping; none of an engine that is gone."""
        if self.discarded:
            raise ClosedError("the segment was discarded: its engine is gone")
        return super().view()

    def discard(self) -> None:
        """Give a dead engine's memory back to the machine at once; idempotent.

        Private zeros take its place at the same address, so that a transfer in flight can neither
        crash this process nor touch anything real. Live views read zeros. Memory that a device
        pinned goes when it is deregistered.
        """
        pages = self._mapped()
        if not self.discarded:
            pages.discard()
            self.discarded, self._tensor = True, None
            self._unwatch()

    def unmap(self) -> None:
        """`close`, which no transfer may be in flight for: `discard` is for that."""
        self.close()

    def close(self) -> None:
        """As every mapping."""
        super().close()
        self._unwatch()


def _nothing() -> None: ...


def _seal_against_shrinking(fd: int) -> bool:
    """Add the seal; return False when this kind of file, or its owner, forbids it."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return True
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
    return True


def _check_file(fd: int, size_bytes: int) -> None:
    if size_bytes <= 0:
        raise SegmentError(f"a segment of {size_bytes} bytes makes no sense")
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or libc.file_system_type(fd) not in _MEMORY_FILE_SYSTEMS:
        raise SegmentError(
            "the descriptor is not a memory file: pass one of memfd_create or of shm_open"
        )
    if status.st_size != size_bytes:
        raise SegmentError(
            f"the segment's file has {status.st_size} bytes but {size_bytes} were claimed",
            actual_bytes=status.st_size,
            claimed_bytes=size_bytes,
        )


# A sparse file of a terabyte costs an engine nothing and passes every check of its size. To reserve
# it would be this process's memory: the room is checked first, for what is not there yet only.
def _reserve_holes(fd: int, size_bytes: int) -> None:
    """Reserve what the engine did not, unless a sparse file promises more than the machine has."""
    present_bytes = os.fstat(fd).st_blocks * 512
    check_memory(size_bytes - present_bytes)
    os.posix_fallocate(fd, 0, size_bytes)
