"""Owns the agent's mapping of a segment that came as a file descriptor, of an engine or an agent.

Refuses to trust who passed it: the file must be a memory file of exactly the claimed size. That of
an engine is sealed against truncation where the kernel allows that, and its pages are reserved.
"""

import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvbus.errors import ClosedError, SegmentError
from kvbus.memory import libc
from kvbus.memory.bus_errors import BusErrors, OnCut
from kvbus.memory.pages import MappedFile, Pages
from kvbus.memory.room import check_mappings, check_memory

_POPULATE_WITHIN_S = 2.0  # an engine waits for it while it registers
_LENT_PERCENT = 50  # of the files that a process may open: the others are for its sockets
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}


class SegmentMapping(MappedFile):
    """A segment that another process passed, mapped here; ``discarded`` once its bytes are gone.

    Takes over ``fd`` and closes it, also when it raises. That of an engine is entered into the page
    table, so that no read has to, for two seconds at most, and takes longer when the engine left
    pages unreserved: an event loop calls it in a thread. With ``lend`` it keeps ``lent_fd``, open
    for reading only, for agents that map the segment too, until the memory is discarded; None when
    there is no room for it. ``borrowed`` says that it is such an agent's: to be read only.
    Raises ``SegmentError``.

    ``sealed`` is False when who made the file can still truncate it (torch's shared storage cannot
    be sealed): then the next access here is SIGBUS, which `survive_cuts` is for.
    """

    lent_fd: int | None = None

    def __init__(
        self, fd: int, *, size_bytes: int, lend: bool = False, borrowed: bool = False
    ) -> None:
        self.size_bytes, self.discarded = size_bytes, False
        self._watcher: BusErrors | None = None
        with _taken_over(fd, size_bytes, borrowed=borrowed):
            if not borrowed:  # who borrows maps several, and looks once
                check_mappings()
            self.sealed = _seal_against_shrinking(fd)
            _check_file(fd, size_bytes)
            check_memory(_missing_bytes(fd, size_bytes))
            if not borrowed:
                os.posix_fallocate(fd, 0, size_bytes)
            self._pages = Pages(fd, size_bytes, writable=not borrowed)
            if not borrowed:
                self._pages.populate(_POPULATE_WITHIN_S)
            self.lent_fd = _reopened(fd) if lend else None

    def survive_cuts(self, bus_errors: BusErrors, on_cut: OnCut) -> None:
        """Have this process live when somebody truncates the file; ``on_cut`` is told of it.

        Zeros take the place of all of the segment then, as after `discard`.
        """
        pages = self._mapped()
        bus_errors.watch(pages.address, pages.length_bytes, on_cut)
        self._watcher = bus_errors

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
            self._forget(pages)

    def close(self) -> None:
        """As every mapping."""
        pages = self._pages
        super().close()
        if pages is not None:
            self._forget(pages)

    def unmap(self) -> None:
        """`close`, which no transfer may be in flight for: `discard` is for that."""
        self.close()

    def _forget(self, pages: Pages) -> None:
        """The file's bytes are not here any more: nobody cuts them, and they are lent no longer."""
        if self._watcher is not None:
            self._watcher.unwatch(pages.address)
        fd, self.lent_fd = self.lent_fd, None
        if fd is not None:
            os.close(fd)


@contextmanager
def _taken_over(fd: int, size_bytes: int, *, borrowed: bool) -> Iterator[None]:
    """Close the descriptor of what is mapped; an ``OSError`` is a `SegmentError`."""
    whose = "the other agent's" if borrowed else "the engine's"
    needs = "its descriptor must be open for reading and writing, and memory be free"
    try:
        yield
    except OSError as error:
        raise SegmentError(
            f"cannot map {whose} segment of {size_bytes} bytes: {error.strerror}"
            f"{'' if borrowed else f'; {needs}'}"
        ) from error
    finally:
        os.close(fd)


# The descriptor that an engine passed is open for writing. One that is opened anew, by its name in
# /proc, has a mode of its own: who gets it cannot map the memory writable by mistake.
def _reopened(fd: int) -> int | None:
    """The file, open for reading only; None when this process should open no more."""
    try:
        lent_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    # The kernel gives the lowest number that is free, so this one tells how many are open.
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if lent_fd * 100 < most * _LENT_PERCENT:
        return lent_fd
    os.close(lent_fd)
    return None


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
def _missing_bytes(fd: int, size_bytes: int) -> int:
    """How much of the file is not there yet."""
    return size_bytes - os.fstat(fd).st_blocks * 512
