"""Memory that an engine creates for its KV cache."""

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path
from typing import Literal

from kvbus.errors import SegmentError
from kvbus.memory import libc
from kvbus.memory.mapping import MappedFile
from kvbus.memory.memory_limits import check_memory

HugePages = bool | Literal["advise"]
"""True: reserved pages (vm.nr_hugepages). "advise": the kernel decides."""

SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ADVICE = {
    errno.ENOMEM: "make it smaller, or free memory",
    errno.ENOSPC: "make it smaller, or free memory",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max)",
}


class SharedSegment(MappedFile):
    """A sealed memory file of zeros, mapped here. Raises ``SegmentError``.

    ``huge_pages`` True rounds ``size_bytes`` up to whole reserved pages, or uses ordinary ones if
    there are none.
    """

    def __init__(
        self, size_bytes: int, *, name: str = "kvbus", huge_pages: HugePages = False
    ) -> None:
        if size_bytes <= 0:
            raise SegmentError(f"a segment of {size_bytes} bytes makes no sense")
        self._fd = new_memory_file(name, size_bytes, huge_pages=huge_pages)
        try:
            status = os.fstat(self._fd)
            super().__init__(self._fd, status.st_size)
            self.uses_huge_pages = status.st_blksize > os.sysconf("SC_PAGESIZE")
            if huge_pages == "advise":
                self.populate()  # only mapped huge pages are visible
                self.uses_huge_pages = huge_bytes(self.address) > 0
        except OSError as error:
            if self.closed:  # not mapped yet
                os.close(self._fd)
            else:
                self.close()
            raise _refusal(error, size_bytes) from error

    @property
    def fd(self) -> int:
        """Borrowed: ``close`` closes it."""
        self._check_open()
        return self._fd

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


# Three steps in this order keep a segment from killing a process later:
#
#     check_memory     fallocate of more than is available starts the out-of-memory killer, which
#                      may choose any process. So a size that does not fit is refused first.
#     posix_fallocate  the first access to a page that was only promised may raise SIGBUS, here or
#                      in the agent. So every page is allocated now, and a failure is an error.
#     seals            a process that truncates the file takes pages from the other, SIGBUS again.
#                      So no process can shrink or grow the file, or remove the seals.
#
# The kernel counts reserved huge pages separately, and fallocate refuses them without the killer.
def new_memory_file(name: str, size_bytes: int, *, huge_pages: HugePages) -> int:
    """Return the descriptor of a sealed memory file of zeros. Blocks for 0.3 s a GiB or more.

    Raises `SegmentError`.
    """
    if huge_pages is True:
        try:
            return _reserve_file(name, size_bytes, os.MFD_HUGETLB)
        except (OSError, OverflowError):
            pass  # none configured, or too few: use ordinary pages
    check_memory(size_bytes)
    try:
        return _reserve_file(name, size_bytes, 0, advise=huge_pages == "advise")
    except OSError as error:
        raise _refusal(error, size_bytes) from error


def _reserve_file(name: str, size_bytes: int, flags: int, *, advise: bool = False) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        granule_bytes = os.fstat(fd).st_blksize if flags else 1
        rounded_bytes = -(-size_bytes // granule_bytes) * granule_bytes
        os.ftruncate(fd, rounded_bytes)
        if advise:
            _touch_advised(fd, rounded_bytes)
        os.posix_fallocate(fd, 0, rounded_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refusal(error: OSError, size_bytes: int) -> SegmentError:
    advice = _ADVICE.get(error.errno or 0, "see the cause")
    return SegmentError(
        f"cannot create a segment of {size_bytes} bytes: {error.strerror}; {advice}",
        size_bytes=size_bytes,
    )


def shmem_policy() -> str:
    try:
        policies = SHMEM_ENABLED.read_text(encoding="ascii")
    except OSError:
        return ""
    return policies.partition("[")[2].partition("]")[0]


# The kernel reads the advice when a page is first touched through the advised mapping.
# posix_fallocate allocates pages through no mapping: they are ordinary, and stay so. So the pages
# are touched first, which leaves their zeros unchanged. posix_fallocate then finds them allocated.
def _touch_advised(fd: int, length_bytes: int) -> None:
    with contextlib.suppress(OSError):
        address = libc.map_shared(fd, length_bytes)
        try:
            libc.advise_huge_pages(address, length_bytes)
            libc.populate(address, length_bytes)
        finally:
            libc.unmap(address, length_bytes)


def huge_bytes(address: int) -> int:
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    (_, _, found) = maps.partition(f"\n{address:x}-")
    sizes = (
        re.search(rf"^{kind}:\s+(\d+) kB$", found, re.MULTILINE)
        for kind in ("ShmemPmdMapped", "AnonHugePages")
    )
    return sum(int(size[1]) * 1024 for size in sizes if size)
