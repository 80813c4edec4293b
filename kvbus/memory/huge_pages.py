"""Huge pages for a memory file: asked for before the first touch, and whether they were given.

Refuses nothing: where the kernel gives none, ordinary pages do.
"""

import contextlib
import re
from pathlib import Path
from typing import Literal

from kvbus.memory import libc

HugePages = bool | Literal["advise"]
"""False for ordinary pages, True for reserved ones (vm.nr_hugepages), "advise" for the kernel's."""

SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
GIVING_WORDS = ("always", "within_size", "advise", "force")
"""What ``SHMEM_ENABLED`` says where memory that is advised gets huge pages."""


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
def touch_advised(fd: int, length_bytes: int) -> None:
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
    sizes = re.search(r"^ShmemPmdMapped:\s+(\d+) kB$", found, re.MULTILINE)
    return int(sizes[1]) * 1024 if sizes else 0
