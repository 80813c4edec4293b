"""The few calls of the C library that Python does not offer at a known address.

Each function is one call, and a failure is an ``OSError``. The constants are those of Linux on
x86-64 and arm64.
"""

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
_STATFS_BYTES = 256  # more than any Linux struct statfs, whose first long is the file system's type

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def map_shared(fd: int, length_bytes: int, *, writable: bool = True) -> int:
    """Map the file, readable, where the kernel likes; return the address."""
    protection = _READ_WRITE if writable else _mmap.PROT_READ
    return _mmap_at(None, length_bytes, _mmap.MAP_SHARED, fd, protection=protection)


def map_zeros_over(address: int, length_bytes: int) -> None:
    """Replace, in one step, what is mapped there by private zeros that cost memory when written."""
    flags = _MAP_FIXED | _mmap.MAP_ANONYMOUS | _mmap.MAP_PRIVATE | _MAP_NORESERVE
    _mmap_at(address, length_bytes, flags, -1)  # -1: what mmap asks for when there is no file


def populate(address: int, length_bytes: int, *, writable: bool = True) -> None:
    """Enter all pages there into the page table, without a change of their bytes.

    Fails with EINVAL before Linux 5.14.
    """
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    if _libc.madvise(address, length_bytes, advice) != 0:
        raise _last_error()


def advise_huge_pages(address: int, length_bytes: int) -> None:
    """Have the pages that are touched there for the first time be huge ones, if the kernel may.

    Fails with EINVAL where the kernel has none.
    """
    if _libc.madvise(address, length_bytes, _MADV_HUGEPAGE) != 0:
        raise _last_error()


def unmap(address: int, length_bytes: int) -> None:
    """Give the addresses back."""
    if _libc.munmap(address, length_bytes) != 0:
        raise _last_error()


def file_system_type(fd: int) -> int:
    """Return the magic number of the file system that holds the file; see statfs(2)."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, answer) != 0:
        raise _last_error()
    return ctypes.c_long.from_buffer(answer).value


def set_signal_action(number: int, new: int, old: int | None) -> None:
    """Take the ``struct sigaction`` at ``new`` from now on; the one before goes to ``old``."""
    if _libc.sigaction(number, new, old) != 0:
        raise _last_error()


def _mmap_at(
    address: int | None, length_bytes: int, flags: int, fd: int, *, protection: int = _READ_WRITE
) -> int:
    mapped: int | None = _libc.mmap(address, length_bytes, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise _last_error()
    return mapped


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
