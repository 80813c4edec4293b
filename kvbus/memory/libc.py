"""C library calls that Python lacks. They raise ``OSError``."""

import ctypes
import mmap as _mmap
import os

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = _mmap.PROT_READ | _mmap.PROT_WRITE
_STATFS_BYTES = 256  # over any Linux struct statfs, whose first long is the file system type

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _pointer
_libc.mmap.argtypes = [_pointer, _size, _int, _int, _int, ctypes.c_long]
_libc.munmap.argtypes = [_pointer, _size]
_libc.madvise.argtypes = [_pointer, _size, _int]
_libc.sigaction.argtypes = [_int, _pointer, _pointer]
_libc.fstatfs.argtypes = [_int, _pointer]


def map_shared(fd: int, length_bytes: int, *, writable: bool = True) -> int:
    protection = _READ_WRITE if writable else _mmap.PROT_READ
    return _mapped(_libc.mmap(None, length_bytes, protection, _mmap.MAP_SHARED, fd, 0))


def map_zeros_over(address: int, length_bytes: int) -> None:
    """The replacement is atomic. Zeros cost memory when written."""
    flags = _MAP_FIXED | _mmap.MAP_ANONYMOUS | _mmap.MAP_PRIVATE | _MAP_NORESERVE
    _mapped(_libc.mmap(address, length_bytes, _READ_WRITE, flags, -1, 0))  # -1: no file


def populate(address: int, length_bytes: int, *, writable: bool = True) -> None:
    """Enter pages into the page table, unchanged. Fails with EINVAL before Linux 5.14."""
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    _check(_libc.madvise(address, length_bytes, advice))


def advise_huge_pages(address: int, length_bytes: int) -> None:
    _check(_libc.madvise(address, length_bytes, _MADV_HUGEPAGE))


def unmap(address: int, length_bytes: int) -> None:
    _check(_libc.munmap(address, length_bytes))


def file_system_type(fd: int) -> int:
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    _check(_libc.fstatfs(fd, answer))
    return ctypes.c_long.from_buffer(answer).value


def set_signal_action(number: int, new: int, old: int | None) -> None:
    """Install the ``struct sigaction`` at ``new``; write the previous one to ``old``."""
    _check(_libc.sigaction(number, new, old))


def _mapped(address: int | None) -> int:
    if address is None or address == _MAP_FAILED:
        raise _last_error()
    return address


def _check(failed: int) -> None:
    if failed:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
