"""Memory files mapped into this process.

Passed files are not trusted: each must be a memory file of the claimed size. It is sealed against
truncation if possible, and its pages are reserved.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from kvbus.memory.bus_errors import BusErrors, OnTruncated
from kvbus.memory.memory_limits import check_memory
from kvbus.memory.run_copy import swap_word

if TYPE_CHECKING:
    import torch

POPULATE_WITHIN_S = 2.0
_POPULATED_AT_ONCE_BYTES = 1 << 28
_DISCARDED_AT_ONCE_BYTES = 1 << 25
_SEGMENTS_PERCENT = 75  # of the files that a process may open; its sockets need the rest
_MEMORY_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}


class OwnedMemory:
    """Memory that its owner must close: other processes use its address without a reference."""

    closed = True  # until __init__ has mapped it
    size_bytes: int

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not (self.closed or sys.is_finalizing()):  # at exit the kernel frees it
            what = f"{type(self).__name__} of {self.size_bytes} bytes"
            warnings.warn(f"{what} was never closed", ResourceWarning, stacklevel=2)


class MappedFile(OwnedMemory):
    """A memory file, mapped shared. Raises ``OSError``.

    After ``close``, its addresses read zeros until it and its last view are collected.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        self._address = libc.map_shared(fd, size_bytes, writable=writable)
        self.size_bytes, self._writable = size_bytes, writable
        self.closed = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """numpy views keep this object alive."""
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size_bytes,),
            "data": (self._address, not self._writable),
        }

    @property
    def address(self) -> int:
        self._check_open()
        return self._address

    @property
    def tensor(self) -> torch.Tensor:
        import torch  # noqa: PLC0415 - takes seconds, and `view` does not need it

        return torch.from_numpy(self.view())

    def view(self) -> npt.NDArray[np.uint8]:
        self._check_open()
        return np.asarray(self)

    def swap(self, number: int, expected: int, value: int) -> int:
        """Compare and swap a 64-bit cell; return the old value. Needs the C kernel."""
        found: int = swap_word(self._address + 8 * number, expected, value)
        return found

    def populate(
        self,
        within_s: float = POPULATE_WITHIN_S,
        *,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        deadline = time.monotonic() + within_s
        with contextlib.suppress(OSError):
            for offset in range(0, self.size_bytes, _POPULATED_AT_ONCE_BYTES):
                if time.monotonic() >= deadline or not is_needed():
                    return
                length = min(_POPULATED_AT_ONCE_BYTES, self.size_bytes - offset)
                libc.populate(self._address + offset, length, writable=self._writable)

    # An engine can die while NIXL reads or writes its memory. NIXL cannot cancel the operation, and
    # it knows only addresses. Unmapping them would crash this process, or send the bytes to the
    # next mapping there. So one mmap replaces the pages under the same addresses, without a gap:
    #
    #     before   address ──▶ pages of the file (the engine's KV)
    #     zeroed   address ──▶ private zeros; the file's pages are free once no process maps them
    #     close    as zeroed; the addresses are unmapped when the last view is collected
    #
    # A page of zeros costs memory only when it is written. The kernel needs time for each GiB, and
    # delays every page fault of the process meanwhile. So the pages are replaced in parts.
    def close(self) -> None:
        """Idempotent. Blocks for 0.1 s per GiB or more: use a thread."""
        if not self.closed:
            self.closed = True
            finalizer = weakref.finalize(self, libc.unmap, self._address, self.size_bytes)
            finalizer.atexit = False  # at exit views may be alive, and the kernel cleans up
            self._put_zeros()

    def _put_zeros(self) -> None:
        for offset in range(0, self.size_bytes, _DISCARDED_AT_ONCE_BYTES):
            length = min(_DISCARDED_AT_ONCE_BYTES, self.size_bytes - offset)
            libc.map_zeros_over(self._address + offset, length)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the segment was closed")


def do_all(calls: Iterable[Callable[[], object]]) -> None:
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
    """Owns ``fd``, also if it raises. Blocks while it reserves pages: use a thread.

    Raises `SegmentError`, also when descriptors run short (``busy``).
    """

    def __init__(self, fd: int, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        try:
            with _segment_errors(size_bytes, borrowed=False):
                self.sealed = _check_segment(fd, size_bytes)
                self.is_lendable = _try_reopen(fd)
                check_descriptors(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    @property
    def is_closed(self) -> bool:
        return self.fd < 0

    def was_cut(self) -> bool:
        return not (self.sealed or self.is_closed) and os.fstat(self.fd).st_size < self.size_bytes

    # The passed descriptor is open for writing. A descriptor that is opened by its name in /proc
    # has its own mode: a process that receives KV cannot map it writable by mistake.
    def reopen(self, *, writable: bool = False) -> int:
        """Raises ``OSError``, or `ClosedError` after `close`."""
        if self.is_closed:
            raise ClosedError("the engine has ended")
        return _reopen(self.fd, os.O_RDWR if writable else os.O_RDONLY)

    def close(self) -> None:
        """Idempotent. Blocks long if this frees the memory."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class CellsPage(MappedFile):
    def __init__(self, passed: PassedFile) -> None:
        super().__init__(passed.fd, passed.size_bytes)
        self._passed = passed

    def reopen(self) -> int:
        return self._passed.reopen(writable=True)


class SequencePage(MappedFile):
    """Sequence words of an engine, which this process only reads."""

    def __init__(self, passed: PassedFile) -> None:
        super().__init__(passed.fd, passed.size_bytes, writable=False)

    def __getitem__(self, word: int) -> int:
        return ctypes.c_uint64.from_address(self._address + 8 * word).value


class SegmentMapping(MappedFile):
    """Closes ``fd``, also if it raises ``SegmentError``.

    Blocks while it reserves pages: use a thread. Unless it is ``sealed``, an access can raise
    SIGBUS.
    """

    def __init__(self, fd: int, *, size_bytes: int, borrowed: bool = False) -> None:
        self.discarded = False
        self._watcher: BusErrors | None = None
        with _taken_over(fd, size_bytes, borrowed=borrowed):
            self.sealed = _check_segment(fd, size_bytes, reserve=not borrowed)
            super().__init__(fd, size_bytes, writable=not borrowed)

    def survive_truncation(self, bus_errors: BusErrors, on_cut: OnTruncated) -> None:
        bus_errors.watch(self.address, self.size_bytes, on_cut)
        self._watcher = bus_errors

    def view(self) -> npt.NDArray[np.uint8]:
        if self.discarded:
            raise ClosedError("the segment was discarded: its engine is gone")
        return super().view()

    def discard(self) -> None:
        """Free a dead engine's memory at once; idempotent. Live views read zeros.

        A transfer in flight can then neither crash this process nor touch real memory. Memory that
        a device pinned is freed when it is deregistered.
        """
        self._check_open()
        if not self.discarded:
            self._put_zeros()
            self.discarded = True
            self._remove()

    def close(self) -> None:
        """With a transfer in flight, call `discard` instead."""
        if not self.closed:
            super().close()
            self._remove()

    def _remove(self) -> None:
        if self._watcher is not None:
            self._watcher.unwatch(self._address)


def _check_segment(fd: int, size_bytes: int, *, reserve: bool = True) -> bool:
    """Return whether it is sealed."""
    sealed = _seal_against_shrinking(fd)
    _check_file(fd, size_bytes)
    missing_bytes = _missing_bytes(fd, size_bytes)
    check_memory(missing_bytes)
    if reserve and missing_bytes > 0:
        os.posix_fallocate(fd, 0, size_bytes)
    return sealed


def check_descriptors(fd: int, size_bytes: int) -> None:
    """Raise `SegmentError` (busy) if the process has few files left."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel returns the lowest free number, so this one shows how many files are open.
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
    """Return False if the kind of file or its owner forbids the seal."""
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
# its pages would take this process's memory. So the missing part must fit first.
def _missing_bytes(fd: int, size_bytes: int) -> int:
    return size_bytes - os.fstat(fd).st_blocks * 512
