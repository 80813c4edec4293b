"""Collects what the kernel says of memory and cores, and makes one small segment.

Refuses to reserve what a KV cache would need.
"""

import os
from pathlib import Path

from kvbus.doctor.judge.memory import FOLDER, MemoryFacts
from kvbus.errors import SegmentError
from kvbus.memory.room import available_bytes, cgroup_folder
from kvbus.memory.segment import SharedSegment

SEGMENT_BYTES = 1 << 20
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def memory_facts() -> MemoryFacts:
    """Everything about memory."""
    fields = _meminfo()
    folder_bytes, folder_free_bytes = _folder_size()
    return MemoryFacts(
        total_bytes=fields["MemTotal"] * 1024,
        available_bytes=available_bytes(),
        group_limit_bytes=_group_limit_bytes(),
        folder_bytes=folder_bytes,
        folder_free_bytes=folder_free_bytes,
        segment_error=_segment_error(),
        huge_page_bytes=fields.get("Hugepagesize", 0) * 1024,
        num_free_huge_pages=fields.get("HugePages_Free", 0),
        shmem_huge=_chosen_word(_SHMEM_HUGE),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
    )


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) for name, value in fields}


def _folder_size() -> tuple[int | None, int | None]:
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return None, None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _segment_error() -> str:
    try:
        SharedSegment(SEGMENT_BYTES, name="kvbus-doctor").close()
    except (SegmentError, OSError) as error:
        return str(error)
    return ""


def _chosen_word(path: Path) -> str:
    """The word in brackets of a setting that lists all its words."""
    try:
        return path.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _group_limit_bytes() -> int | None:
    words = _group_words("memory.max")
    return int(words[0]) if words and words[0] != "max" else None


def _cpu_quota() -> float | None:
    words = _group_words("cpu.max")
    return int(words[0]) / int(words[1]) if words and words[0] != "max" else None


def _group_words(name: str) -> list[str]:
    try:
        return (cgroup_folder() / name).read_text(encoding="ascii").split()
    except OSError:
        return []
