"""A memory file that is mapped here: what all of them do, and those that another process passed.

What is passed is not trusted: it must be a memory file of exactly the claimed size. That of an
engine is sealed against truncation where the kernel allows that, and its pages are reserved.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvbus.errors import ClosedError, ErrorCode, KVBusError, SegmentError
from kvbus.memory import libc
from kvbus.memory.bus_errors import BusErrors, OnCut
from kvbus.memory.room import check_memory
from kvbus.memory.run_copy import swap_word

if TYPE_CHECKING:
    import torch

POPULATE_WITHIN_S = 2.0
"""An engine waits so long, at most, as it makes its memory."""
_POPULATED_AT_ONCE_BYTES = 1 << 28
_DISCARDED_AT_ONCE_BYTES = 1 << 25
_SEGMENTS_PERCENT = 75  # of the files that a process may open: the others are for its sockets
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}


class OwnedMemory:
    """Memory that goes when its owner closes it; the garbage collector only warns.

    NIXL, kernels and other processes use its address without Python knowing of them.
    """

    closed = True  # until there is some
    size_bytes: int

    def close(self) -> None:
        """Give it back; idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not (self.closed or sys.is_finalizing()):  # at exit the kernel takes all of it
            what = f"{type(self).__name__} of {self.size_bytes} bytes"
            warnings.warn(f"{what} was never closed", ResourceWarning, stacklevel=2)


class MappedFile(OwnedMemory):
    """A memory file, mapped shared until ``close``. Raises ``OSError``.

    The addresses stay until this object and the last numpy or torch view of it are gone: from
    ``close`` on they read zeros.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        self._address = libc.map_shared(fd, size_bytes, writable=writable)
        self.size_bytes, self._writable = size_bytes, writable
        self.closed = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What numpy reads to make a view that keeps this object alive."""
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size_bytes,),
            "data": (self._address, not self._writable),
        }

    @property
    def address(self) -> int:
        """Where the first byte is in this process."""
        self._check_open()
        return self._address

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as one uint8 tensor."""
        import torch  # noqa: PLC0415 - costs seconds, and who wants numpy should not pay

        return torch.from_numpy(self.view())

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes, writable where the mapping is."""
        self._check_open()
        return np.asarray(self)

    def swap(self, number: int, expected: int, value: int) -> int:
        """Put ``value`` in the place of word ``number`` if that is as expected; what was there.

        A word has 64 bits. Needs the kernel in C. After `close` no other process has these words.
        """
        found: int = swap_word(self._address + 8 * number, expected, value)
        return found

    def populate(
        self,
        within_s: float = POPULATE_WITHIN_S,
        *,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have the first access to each page cost no more than later ones, if the kernel can.

        From the first page on, for ``within_s`` seconds at most, and while it ``is_needed``.
        """
        deadline = time.monotonic() + within_s
        with contextlib.suppress(OSError):
            for offset in range(0, self.size_bytes, _POPULATED_AT_ONCE_BYTES):
                if time.monotonic() >= deadline or not is_needed():
                    return
                length = min(_POPULATED_AT_ONCE_BYTES, self.size_bytes - offset)
                libc.populate(self._address + offset, length, writable=self._writable)

    # An engine dies while NIXL reads from its memory, or writes into it. NIXL cannot cancel, and
    # has only addresses. To unmap them would crash this process, or let the bytes land in whatever
    # is mapped there next. So one mmap puts other pages under the same addresses, with no moment
    # at which nothing is there:
    #
    #     before   address ──▶ pages of the file (the engine's KV)
    #     zeroed   address ──▶ private zeros; the file's pages are free once nobody else maps them
    #     close    as zeroed; the addresses go when the last view is collected
    #
    # A page of zeros costs memory only when something is written into it. The kernel takes a while
    # for each GiB, and keeps every page fault of the process waiting meanwhile: hence the parts.
    def close(self) -> None:
        """Give the memory back here; idempotent. The mapping of another process lives on by itself.

        It takes a tenth of a second and more for each GiB: large ones belong into a thread.
        """
        if not self.closed:
            self.closed = True
            finalizer = weakref.finalize(self, libc.unmap, self._address, self.size_bytes)
            finalizer.atexit = False  # at exit, views may be alive and the kernel cleans up anyway
            self._put_zeros()

    def _put_zeros(self) -> None:
        for offset in range(0, self.size_bytes, _DISCARDED_AT_ONCE_BYTES):
            length = min(_DISCARDED_AT_ONCE_BYTES, self.size_bytes - offset)
            libc.map_zeros_over(self._address + offset, length)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the segment was closed")


def do_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, which give memory back; raise the first `KVBusError` then."""
    failures: list[KVBusError] = []
    for call in calls:
        try:
            call()
        except KVBusError as error:
            failures.append(error)
        except OSError as error:
            failures.append(SegmentError(f"memory cannot be given back: {error.strerror}"))
    if failures:
        raise failures[0]


class PassedFile:
    """A segment that an engine passed: its descriptor, checked, and not mapped.

    Takes over ``fd``. An event loop makes it in a thread, as to reserve pages takes long. Raises
    `SegmentError`, with code ``busy`` when the descriptors of this process are used up.

    ``sealed`` is False when the owner of the file can still truncate it. ``is_lendable`` says
    whether other processes can get it, read-only.
    """

    def __init__(self, fd: int, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        try:
            with _segment_errors(size_bytes, borrowed=False):
                self.sealed = _check_segment(fd, size_bytes)
                self.is_lendable = _try_reopen(fd)
                _check_descriptors(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    @property
    def is_closed(self) -> bool:
        return self.fd < 0

    def was_cut(self) -> bool:
        """Return whether the file was truncated."""
        return not (self.sealed or self.is_closed) and os.fstat(self.fd).st_size < self.size_bytes

    # The descriptor that an engine passed is open for writing. One that is opened anew, by its name
    # in /proc, has a mode of its own: who gets KV cannot map it writable by mistake.
    def reopen(self, *, writable: bool = False) -> int:
        """Return a new descriptor, for reading only unless ``writable``.

        Raises ``OSError``, and `ClosedError` once it is closed.
        """
        if self.is_closed:
            raise ClosedError("the engine has ended")
        return _reopen(self.fd, os.O_RDWR if writable else os.O_RDONLY)

    def close(self) -> None:
        """Close the descriptor; idempotent. It takes long when the memory goes with it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class WordsPage(MappedFile):
    """A page of words that an engine passed. Raises ``OSError``."""

    def __init__(self, passed: PassedFile) -> None:
        super().__init__(passed.fd, passed.size_bytes)
        self._passed = passed

    def reopen(self) -> int:
        """Return a new descriptor for reading and writing. Raises as `PassedFile.reopen`."""
        return self._passed.reopen(writable=True)


class SegmentMapping(MappedFile):
    """A segment that another process passed, mapped here; ``discarded`` once its bytes are gone.

    Takes over ``fd`` and closes it, also when it raises. It takes long when the engine left pages
    unreserved: an event loop calls it in a thread. ``borrowed`` says that it is another agent's: to
    be read only. Raises ``SegmentError``.

    ``sealed`` is False when who made the file can still truncate it (torch's shared storage cannot
    be sealed): then the next access here is SIGBUS, which `survive_cuts` is for.
    """

    def __init__(self, fd: int, *, size_bytes: int, borrowed: bool = False) -> None:
        self.discarded = False
        self._watcher: BusErrors | None = None
        with _taken_over(fd, size_bytes, borrowed=borrowed):
            self.sealed = _check_segment(fd, size_bytes, reserve=not borrowed)
            super().__init__(fd, size_bytes, writable=not borrowed)

    def survive_cuts(self, bus_errors: BusErrors, on_cut: OnCut) -> None:
        """Have this process live when somebody truncates the file; ``on_cut`` is told of it.

        Zeros take the place of all of the segment then, as after `discard`.
        """
        bus_errors.watch(self.address, self.size_bytes, on_cut)
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
        self._check_open()
        if not self.discarded:
            self._put_zeros()
            self.discarded = True
            self._forget()

    def close(self) -> None:
        """As every mapping; no transfer may be in flight: `discard` is for that."""
        if not self.closed:
            super().close()
            self._forget()

    def _forget(self) -> None:
        """The file's bytes are not here any more: nobody cuts them."""
        if self._watcher is not None:
            self._watcher.unwatch(self._address)


def _check_segment(fd: int, size_bytes: int, *, reserve: bool = True) -> bool:
    """Check a segment, and reserve its pages; return whether it is sealed."""
    sealed = _seal_against_shrinking(fd)
    _check_file(fd, size_bytes)
    missing_bytes = _missing_bytes(fd, size_bytes)
    check_memory(missing_bytes)
    if reserve and missing_bytes > 0:
        os.posix_fallocate(fd, 0, size_bytes)
    return sealed


def _check_descriptors(fd: int, size_bytes: int) -> None:
    """Raise `SegmentError` (``busy``) unless enough descriptors are left for connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel gives the lowest number that is free, so this one tells how many are open.
    if fd * 100 >= limit * _SEGMENTS_PERCENT:
        raise SegmentError(
            f"cannot keep a segment of {size_bytes} bytes: the agent has {fd} of {limit} files "
            "open; raise its limit (ulimit -n, or LimitNOFILE of systemd), or pass fewer segments",
            code=ErrorCode.BUSY,
            limit=limit,
        )


def _try_reopen(fd: int) -> bool:
    try:
        os.close(_reopen(fd, os.O_RDONLY))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _taken_over(fd: int, size_bytes: int, *, borrowed: bool) -> Iterator[None]:
    """Close the descriptor of what is mapped; an ``OSError`` is a `SegmentError`."""
    try:
        with _segment_errors(size_bytes, borrowed=borrowed):
            yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _segment_errors(size_bytes: int, *, borrowed: bool) -> Iterator[None]:
    whose = "the other agent's" if borrowed else "the engine's"
    needs = "its descriptor must be open for reading and writing, and memory be free"
    try:
        yield
    except OSError as error:
        raise SegmentError(
            f"cannot map {whose} segment of {size_bytes} bytes: {error.strerror}"
            f"{'' if borrowed else f'; {needs}'}"
        ) from error


def _reopen(fd: int, mode: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)


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
