"""Whether versions, memory and limits of this machine are enough for kvbus, and what limits it.

Each finding is a function of what was seen, so that a test can draw every machine.
"""

import os
import platform
import resource
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.errors import SegmentError
from kvbus.memory.room import available_bytes, cgroup_folder
from kvbus.memory.run_copy import is_compiled
from kvbus.memory.segment import GIVING_WORDS, SHMEM_ENABLED, SharedSegment, shmem_word
from kvbus.text import bytes_text

PROJECT, NAMED = "kvbus", ("nixl", "torch", "pyzmq", "numpy")
SEGMENT_BYTES = 1 << 20
GOOD_ROOM_BYTES = 2 << 30
GOOD_FOLDER_BYTES = 1 << 30
"""Containers have 64 MiB if they are not told otherwise."""
FOLDER = "/dev/shm"  # noqa: S108 - where shm_open, and so torch, puts files
LEAST_FILES, GOOD_FILES, MANY_FILES = 64, 1024, 4096
GOOD_FILE_BYTES = 64 << 30
_CAP_IPC_LOCK = 14


def check_versions() -> Iterator[Finding]:
    """Python; each package that is not as the project requires, and those that are."""
    bounds, python = metadata(PROJECT)["Requires-Python"] or "", platform.python_version()
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    is_met = SpecifierSet(bounds).contains(python, prereleases=True)
    yield Finding(
        "versions.python",
        OK if is_met else ERROR,
        f"Python {python}, {system}" + ("" if is_met else f"; required is Python {bounds}"),
        {"version": python, "required": bounds, "system": system},
        why="kvbus uses what older Pythons do not have.",
        fix="Install kvbus into an environment of a Python that is required.",
    )
    right: dict[str, str] = {}
    for one in map(Requirement, requires(PROJECT) or []):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        found = installed(one.name)
        if found and one.specifier.contains(found, prereleases=True):
            right[one.name] = found
            continue
        have = f"{one.name} {found}" if found else f"{one.name} is not installed"
        yield Finding(
            f"versions.{one.name}",
            ERROR,
            f"{have}; required is {one.name}{one.specifier}",
            {"version": found, "required": str(one.specifier)},
            why="kvbus was tested with other versions, and relies on what they do.",
            fix="Install what is required.",
            command=f"pip install '{one.name}{one.specifier}'",
        )
    named = [f"{name} {right[name]}" for name in NAMED if name in right]
    told = ", ".join([*named, f"{len(right) - len(named)} more"])
    yield Finding("versions.packages", OK, f"as required: {told}", right)


def installed(name: str) -> str:
    """The version of a package, which is not imported; empty when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_memory() -> Iterator[Finding]:
    """Segments, room, /dev/shm, huge pages, cores, copies: as a new process would have them."""
    meminfo = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines())
    fields = {name: int(value.split()[0]) for name, value in meminfo.items()}
    limit, quota = _group_words("memory.max"), _group_words("cpu.max")
    folder = os.statvfs(FOLDER) if Path(FOLDER).is_dir() else None
    page_bytes = fields.get("Hugepagesize", 0) * 1024
    yield segment_finding(_segment_error())
    yield room_finding(
        available_bytes(),
        total_bytes=fields["MemTotal"] * 1024,
        group_limit_bytes=int(limit[0]) if limit else None,
    )
    yield folder_finding(
        folder.f_blocks * folder.f_frsize if folder else 0,
        folder.f_bavail * folder.f_frsize if folder else 0,
    )
    yield huge_page_finding(fields.get("HugePages_Free", 0), page_bytes, shmem_word())
    yield core_finding(
        len(os.sched_getaffinity(0)), int(quota[0]) / int(quota[1]) if quota else None
    )
    yield kernel_finding(compiled=is_compiled())


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


def segment_finding(error: str) -> Finding:
    """``error`` is empty when a sealed segment could be made."""
    return Finding(
        "memory.segment",
        ERROR if error else OK,
        f"no sealed memfd: {error}" if error else "a sealed memfd can be made",
        {"error": error},
        why="Engines share their KV cache with their agent in one.",
        fix="Fix what the message says. The kernel must be Linux with memfd_create, and the "
        "sandbox or seccomp profile must allow it.",
    )


def room_finding(
    available_bytes: int, *, total_bytes: int, group_limit_bytes: int | None
) -> Finding:
    """The limit is that of the control group, None when it has none."""
    limit = group_limit_bytes
    limited = "" if limit is None else f"; the control group allows {bytes_text(limit)}"
    return Finding(
        "memory.room",
        OK if available_bytes >= GOOD_ROOM_BYTES else WARNING,
        f"{bytes_text(available_bytes)} available of {bytes_text(total_bytes)}{limited}",
        {
            "available_bytes": available_bytes,
            "total_bytes": total_bytes,
            "group_limit_bytes": limit,
        },
        why="KV caches and staging are reserved when they are made.",
        fix="Free memory, or raise the limit of the container.",
    )


def folder_finding(size_bytes: int, free_bytes: int) -> Finding:
    """Of `FOLDER`, 0 where there is none."""
    return Finding(
        "memory.shared_folder",
        OK if free_bytes >= GOOD_FOLDER_BYTES else NOTE,
        f"{FOLDER} has {bytes_text(free_bytes)} free of {bytes_text(size_bytes)}",
        {"size_bytes": size_bytes, "free_bytes": free_bytes},
        why="Only torch tensors that an engine shares in place (share_tensor) go there; where an "
        "engine does, enlarge it (of a container with --shm-size)",
    )


def huge_page_finding(num_free: int, page_bytes: int, enabled: str) -> Finding:
    """``enabled`` is the kernel's word for huge pages in memfds, empty where it has none."""
    free_bytes = num_free * page_bytes
    word = f"'{enabled}'" if enabled else "not known to the kernel"
    return Finding(
        "memory.huge_pages",
        OK if free_bytes > 0 or enabled in GIVING_WORDS else NOTE,
        f"{bytes_text(free_bytes)} reserved and free; shmem_enabled is {word}",
        {"free_bytes": free_bytes, "page_bytes": page_bytes, "shmem_enabled": enabled},
        why="Segments lie in small pages; large ones can be read faster.",
        fix='Let engines that ask for huge pages (huge_pages="advise") have them, or reserve some '
        "(vm.nr_hugepages) for those that ask for these (huge_pages=True).",
        command=f"echo advise > {SHMEM_ENABLED}",
    )


def core_finding(num_cores: int, quota: float | None) -> Finding:
    """``quota`` is in cores, None when it is not limited."""
    usable = num_cores if quota is None else min(num_cores, int(quota))
    limited = "" if quota is None else f", limited to the time of {quota:g}"
    return Finding(
        "memory.cores",
        OK if usable >= 2 else WARNING,
        f"{num_cores} cores{limited}",
        {"num_cores": num_cores, "cpu_quota": quota},
        why="An agent's event loop and its NIXL thread wait for each other.",
        fix="Give it two cores or more.",
    )


def kernel_finding(*, compiled: bool) -> Finding:
    """Whether the copy kernel was ``compiled`` when kvbus was installed."""
    return Finding(
        "memory.copies",
        OK if compiled else NOTE,
        f"mapped memory is copied by {'the kernel in C' if compiled else 'numpy'}",
        {"compiled": compiled},
        why="Agents of one machine copy KV, by numpy at two thirds of the speed at most.",
        fix="Install a C compiler, then kvbus again.",
    )


def check_limits() -> Iterator[Finding]:
    """Open files, locked memory, sizes of files: the soft limits of an agent started from here."""
    yield open_files_finding(_soft(resource.RLIMIT_NOFILE))
    yield locked_memory_finding(
        _soft(resource.RLIMIT_MEMLOCK), may_lock=_may_lock(), rdma_devices=rdma_devices()
    )
    yield file_size_finding(_soft(resource.RLIMIT_FSIZE))


def _soft(limit: int) -> int | None:
    """None is unlimited."""
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK, for which the limit does not count."""
    lines = dict(line.split(":", 1) for line in text_of("/proc/self/status").splitlines())
    return bool(int(lines["CapEff"], 16) >> _CAP_IPC_LOCK & 1)


def open_files_finding(limit: int | None) -> Finding:
    """From a note to an error, as fewer can be open."""
    severity = OK
    for least, worse in ((MANY_FILES, NOTE), (GOOD_FILES, WARNING), (LEAST_FILES, ERROR)):
        if limit is not None and limit < least:
            severity = worse
    return Finding(
        "limits.open_files",
        severity,
        "unlimited" if limit is None else f"at most {limit:,}",
        {"open_files": limit},
        why="Each peer of an agent costs several, and each segment two.",
        fix="Raise it where the agents are started (systemd: LimitNOFILE=).",
        command="ulimit -n 65536",
    )


def locked_memory_finding(
    limit: int | None, *, may_lock: bool, rdma_devices: Sequence[str]
) -> Finding:
    """A warning at most: whether NIXL works in spite of the limit is measured."""
    severity, found = OK, _at_most(limit)
    if not rdma_devices:
        found += "; there is no RDMA device, and nothing else needs it"
    elif limit is not None and may_lock:
        found += ", which CAP_IPC_LOCK overrides"
    elif limit is not None:
        severity, found = WARNING, f"{found}, with RDMA by {', '.join(rdma_devices)}"
    return Finding(
        "limits.locked_memory",
        severity,
        found,
        {"locked_bytes": limit, "may_lock": may_lock, "rdma_devices": rdma_devices},
        why="RDMA pins all memory that is registered: KV caches and staging.",
        fix="Raise it where the agents are started (systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1).",
        command="ulimit -l unlimited",
    )


def file_size_finding(limit: int | None) -> Finding:
    """None is unlimited."""
    return Finding(
        "limits.file_size",
        OK if limit is None or limit >= GOOD_FILE_BYTES else WARNING,
        _at_most(limit),
        {"file_bytes": limit},
        why="A KV cache in a memfd is a file, and no larger than that.",
        fix="Raise it where the engines are started.",
        command="ulimit -f unlimited",
    )


def _at_most(num_bytes: int | None) -> str:
    return "unlimited" if num_bytes is None else f"at most {bytes_text(num_bytes)}"


def text_of(path: Path | str) -> str:
    """What a file of the kernel says; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def rdma_devices() -> tuple[str, ...]:
    """The names of the RDMA devices of this machine."""
    return tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))
