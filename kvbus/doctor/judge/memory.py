"""Owns what is said about memory and cores: is there room, and can it be shared.

Refuses to know how large a KV cache will be: it tells what there is, and complains of very little.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.doctor.finding import Finding, Severity
from kvbus.text import bytes_text

GOOD_ROOM_BYTES = 2 << 30
GOOD_FOLDER_BYTES = 1 << 30
"""Containers have 64 MiB if they are not told otherwise."""
FOLDER = "/dev/shm"  # noqa: S108 - where shm_open, and so torch, puts files
_SHARES_HUGE_PAGES = ("always", "within_size", "force")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Memory as a new process of ours would have it.

    ``group_limit_bytes`` is that of the control group, None when it has none; ``folder_bytes`` and
    ``folder_free_bytes`` are of `FOLDER`, None where there is none; ``segment_error`` is empty when
    a sealed segment could be made; ``shmem_huge`` is the kernel's word for huge pages in memfds,
    empty where it has none; ``cpu_quota`` is in cores, None when it is not limited.
    """

    total_bytes: int
    available_bytes: int
    group_limit_bytes: int | None
    folder_bytes: int | None
    folder_free_bytes: int | None
    segment_error: str
    huge_page_bytes: int
    num_free_huge_pages: int
    shmem_huge: str
    num_cores: int
    cpu_quota: float | None


def judge_memory(facts: MemoryFacts) -> Iterator[Finding]:
    """Segments, room, /dev/shm, huge pages, cores."""
    yield _segment(facts)
    yield _room(facts)
    yield _folder(facts)
    yield _huge_pages(facts)
    yield _cores(facts)


def _segment(facts: MemoryFacts) -> Finding:
    if not facts.segment_error:
        return Finding(
            name="memory.segment", severity=Severity.OK, found="a sealed memfd can be made"
        )
    return Finding(
        name="memory.segment",
        severity=Severity.ERROR,
        found=f"no sealed memfd: {facts.segment_error}",
        why="Engines share their KV cache with their agent in one.",
        mend="Mend what the message says; the kernel must be Linux with memfd_create, and the "
        "sandbox or seccomp profile must allow it.",
        values={"error": facts.segment_error},
    )


def _room(facts: MemoryFacts) -> Finding:
    limit = facts.group_limit_bytes
    of = f"{bytes_text(facts.available_bytes)} available of {bytes_text(facts.total_bytes)}"
    found = of if limit is None else f"{of}; the control group allows {bytes_text(limit)}"
    is_good = facts.available_bytes >= GOOD_ROOM_BYTES
    return Finding(
        name="memory.room",
        severity=Severity.OK if is_good else Severity.WARNING,
        found=found,
        why="" if is_good else "KV caches and staging are reserved when they are made.",
        mend="" if is_good else "Free memory, or raise the limit of the container.",
        values={
            "available_bytes": facts.available_bytes,
            "total_bytes": facts.total_bytes,
            "group_limit_bytes": limit,
        },
    )


def _folder(facts: MemoryFacts) -> Finding:
    size_bytes, free_bytes = facts.folder_bytes, facts.folder_free_bytes
    if size_bytes is None or free_bytes is None:
        found, is_good = f"there is no {FOLDER}", False
    else:
        found = f"{FOLDER} has {bytes_text(free_bytes)} free of {bytes_text(size_bytes)}"
        is_good = free_bytes >= GOOD_FOLDER_BYTES
    return Finding(
        name="memory.shared_folder",
        severity=Severity.OK if is_good else Severity.NOTE,
        found=found,
        why=""
        if is_good
        else "Only torch tensors that an engine shares in place (share_tensor) go there; the "
        "segments that kvbus allocates do not.",
        mend="" if is_good else "Where an engine does, enlarge it; of a container with --shm-size.",
        values={"size_bytes": size_bytes, "free_bytes": free_bytes},
    )


def _huge_pages(facts: MemoryFacts) -> Finding:
    free_bytes = facts.num_free_huge_pages * facts.huge_page_bytes
    shares = facts.shmem_huge in _SHARES_HUGE_PAGES
    word = f"'{facts.shmem_huge}'" if facts.shmem_huge else "not known to the kernel"
    is_good = shares or free_bytes > 0
    return Finding(
        name="memory.huge_pages",
        severity=Severity.OK if is_good else Severity.NOTE,
        found=f"{bytes_text(free_bytes)} reserved and free; shmem_enabled is {word}",
        why="" if is_good else "Segments lie in small pages; large ones can be read faster.",
        mend="" if is_good else "Let memfds use huge pages, or reserve some (vm.nr_hugepages).",
        command=""
        if is_good
        else "echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        values={
            "free_bytes": free_bytes,
            "page_bytes": facts.huge_page_bytes,
            "shmem_enabled": facts.shmem_huge,
        },
    )


def _cores(facts: MemoryFacts) -> Finding:
    usable = facts.num_cores
    if facts.cpu_quota is not None:
        usable = min(usable, int(facts.cpu_quota))
    is_good = usable >= 2
    quota = "" if facts.cpu_quota is None else f", limited to the time of {facts.cpu_quota:g}"
    return Finding(
        name="memory.cores",
        severity=Severity.OK if is_good else Severity.WARNING,
        found=f"{facts.num_cores} cores{quota}",
        why="" if is_good else "An agent's event loop and its NIXL thread wait for each other.",
        mend="" if is_good else "Give it two cores or more.",
        values={"num_cores": facts.num_cores, "cpu_quota": facts.cpu_quota},
    )
