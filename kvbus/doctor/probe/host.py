"""Collects what this process can see itself: versions, memory, cores, limits, RDMA devices.

Refuses to import a package for its version, to raise a limit, and to reserve what a KV cache needs.
"""

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from kvbus.doctor.check.host import FOLDER, LimitFacts, MemoryFacts
from kvbus.doctor.check.versions import VersionFacts
from kvbus.errors import SegmentError
from kvbus.memory.room import available_bytes, cgroup_folder
from kvbus.memory.segment import SharedSegment

PROJECT = "kvbus"
SEGMENT_BYTES = 1 << 20
_CAP_IPC_LOCK = 14
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def version_facts() -> VersionFacts:
    """What is required, and what is there."""
    found = [Requirement(text) for text in requires(PROJECT) or []]
    requirements = tuple(
        one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})
    )
    versions = {one.name: installed_version(one.name) for one in requirements}
    return VersionFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        python_bounds=metadata(PROJECT)["Requires-Python"] or "",
        requirements=requirements,
        installed={name: text for name, text in versions.items() if text is not None},
    )


def installed_version(name: str) -> str | None:
    """The version of a package, None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def memory_facts() -> MemoryFacts:
    """Memory and cores, and whether one small segment can be made."""
    meminfo = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines())
    fields = {name: int(value.split()[0]) for name, value in meminfo.items()}
    limit, quota = _group_words("memory.max"), _group_words("cpu.max")
    folder = os.statvfs(FOLDER) if Path(FOLDER).is_dir() else None
    return MemoryFacts(
        total_bytes=fields["MemTotal"] * 1024,
        available_bytes=available_bytes(),
        group_limit_bytes=int(limit[0]) if limit else None,
        folder_bytes=folder.f_blocks * folder.f_frsize if folder else None,
        folder_free_bytes=folder.f_bavail * folder.f_frsize if folder else None,
        segment_error=_segment_error(),
        huge_page_bytes=fields.get("Hugepagesize", 0) * 1024,
        num_free_huge_pages=fields.get("HugePages_Free", 0),
        shmem_huge=text_of(_SHMEM_HUGE).partition("[")[2].partition("]")[0],  # the chosen word
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=int(quota[0]) / int(quota[1]) if quota else None,
    )


def _segment_error() -> str:
    try:
        SharedSegment(SEGMENT_BYTES, name="kvbus-doctor").close()
    except (SegmentError, OSError) as error:
        return str(error)
    return ""


def _group_words(name: str) -> list[str]:
    """The words of a limit of the control group, none where it has no limit."""
    words = text_of(cgroup_folder() / name).split()
    return words if words[:1] != ["max"] else []


def text_of(path: Path | str) -> str:
    """What a file of the kernel says; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def has_capability(number: int) -> bool:
    """Whether this process has a capability of Linux."""
    lines = dict(line.split(":", 1) for line in text_of("/proc/self/status").splitlines())
    return bool(int(lines["CapEff"], 16) >> number & 1)


def limit_facts() -> LimitFacts:
    """The soft limits, as they are for an agent that is started from here."""
    return LimitFacts(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
        file_bytes=_soft(resource.RLIMIT_FSIZE),
        may_lock=has_capability(_CAP_IPC_LOCK),
        rdma_devices=rdma_devices(),
    )


def rdma_devices() -> tuple[str, ...]:
    """The names of the RDMA devices of this machine."""
    return tuple(sorted(path.name for path in _RDMA_DEVICES.glob("*")))


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft
