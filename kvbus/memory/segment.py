"""The memory that an engine creates for its KV cache so that an agent can map it.

Every page is reserved at creation, so that a later write cannot end in SIGBUS, and the file is
sealed, so that neither side can cut it under the other.
"""

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
from kvbus.memory.room import check_memory

HugePages = bool | Literal["advise"]
"""False for ordinary pages, True for reserved ones (vm.nr_hugepages), "advise" for the kernel's."""

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
    """A sealed memory file of zeros, mapped here, whose ``fd`` goes over the attach socket.

    ``huge_pages`` True asks for those that the machine has reserved, and rounds ``size_bytes`` up
    to whole ones; "advise" asks the kernel to make some. ``uses_huge_pages`` says whether there
    were any; without, it is ordinary pages. Raises ``SegmentError``.
    """

    def __init__(
        self, size_bytes: int, *, name: str = "kvbus", huge_pages: HugePages = False
    ) -> None:
        if size_bytes <= 0:
            raise SegmentError(f"a segment of {size_bytes} bytes makes no sense")
        self._fd = _create_file(name, size_bytes, huge_pages=huge_pages)
        try:
            status = os.fstat(self._fd)
            super().__init__(self._fd, status.st_size)
            self.uses_huge_pages = status.st_blksize > os.sysconf("SC_PAGESIZE")
            if huge_pages == "advise":
                self.populate()  # what is mapped huge is seen then
                self.uses_huge_pages = huge_bytes(self.address) > 0
        except OSError as error:
            if self.closed:  # it is not mapped
                os.close(self._fd)
            else:
                self.close()
            raise _refusal(error, size_bytes) from error

    @property
    def fd(self) -> int:
        """The descriptor to pass to the agent; borrowed, it is closed by ``close``."""
        self._check_open()
        return self._fd

    def close(self) -> None:
        """As every mapping; the descriptor goes too."""
        if not self.closed:
            os.close(self._fd)
        super().close()


# Three things in this order keep a segment from killing a process later:
#
#     check_memory     fallocate of more than there is ends with the kernel's out-of-memory killer,
#                      which may choose any process; so what cannot fit is refused before
#     posix_fallocate  a page that was only promised is SIGBUS when it is first touched, here or
#                      in the agent; so every page is taken now, and an error is an error
#     seals            who truncates the file takes pages away under the other, SIGBUS again; so
#                      nobody can shrink or grow it any more, nor take the seals off
#
# Huge pages are counted by the kernel on their own, and fallocate refuses them without a killer.
def _create_file(name: str, size_bytes: int, *, huge_pages: HugePages) -> int:
    if huge_pages is True:
        try:
            return _reserve_file(name, size_bytes, os.MFD_HUGETLB)
        except (OSError, OverflowError):
            pass  # none configured, or not enough: ordinary pages do
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


def shmem_word() -> str:
    """What the kernel does for memory files: always, within_size, advise, never, ...; or empty."""
    try:
        words = SHMEM_ENABLED.read_text(encoding="ascii")
    except OSError:
        return ""
    return words.partition("[")[2].partition("]")[0]


# The kernel looks at the advice when a page is touched for the first time, through the mapping that
# was advised. posix_fallocate takes pages through no mapping: ordinary ones, and they stay. So the
# pages are touched first, which changes nothing of their zeros, and then reserved as ever, which
# finds them there.
def _touch_advised(fd: int, length_bytes: int) -> None:
    """Take all pages of a new file, huge ones if the kernel gives them. Raises nothing."""
    with contextlib.suppress(OSError):
        address = libc.map_shared(fd, length_bytes)
        try:
            libc.advise_huge_pages(address, length_bytes)
            libc.populate(address, length_bytes)
        finally:
            libc.unmap(address, length_bytes)


def huge_bytes(address: int) -> int:
    """How much of the mapping that begins at ``address`` this process sees in huge pages."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    (_, _, found) = maps.partition(f"\n{address:x}-")
    sizes = (
        re.search(rf"^{kind}:\s+(\d+) kB$", found, re.MULTILINE)
        for kind in ("ShmemPmdMapped", "AnonHugePages")
    )
    return sum(int(size[1]) * 1024 for size in sizes if size)
