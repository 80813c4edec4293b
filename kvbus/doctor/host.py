"""Whether versions, memory and limits of this machine are enough for kvbus, and what limits it.

Findings are functions of what was seen, so that a test can draw every machine.
"""

import os
import platform
import resource
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, Severity
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


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine has of memory and cores, as a new process would have them.

    ``segment_error`` is empty when a sealed segment could be made. The group's limits are those of
    the control group, None where it has none; ``shmem_enabled`` is the kernel's word for huge pages
    in memfds, empty where it has none; the folder is `FOLDER`.
    """

    segment_error: str
    available_bytes: int
    total_bytes: int
    group_limit_bytes: int | None
    folder_bytes: int
    folder_free_bytes: int
    free_huge_bytes: int
    shmem_enabled: str
    num_cores: int
    cpu_quota: float | None
    compiled: bool


def check_memory() -> Iterator[Finding]:
    """Segments, room, /dev/shm, huge pages, cores, copies."""
    meminfo = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines())
    fields = {name: int(value.split()[0]) for name, value in meminfo.items()}
    limit, quota = _group_words("memory.max"), _group_words("cpu.max")
    folder = os.statvfs(FOLDER) if Path(FOLDER).is_dir() else None
    try:
        SharedSegment(SEGMENT_BYTES, name="kvbus-doctor").close()
        segment_error = ""
    except (SegmentError, OSError) as error:
        segment_error = str(error)
    seen = Memory(
        segment_error=segment_error,
        available_bytes=available_bytes(),
        total_bytes=fields["MemTotal"] * 1024,
        group_limit_bytes=int(limit[0]) if limit else None,
        folder_bytes=folder.f_blocks * folder.f_frsize if folder else 0,
        folder_free_bytes=folder.f_bavail * folder.f_frsize if folder else 0,
        free_huge_bytes=fields.get("HugePages_Free", 0) * fields.get("Hugepagesize", 0) * 1024,
        shmem_enabled=shmem_word(),
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=int(quota[0]) / int(quota[1]) if quota else None,
        compiled=is_compiled(),
    )
    return memory_findings(seen)


def _group_words(name: str) -> list[str]:
    """The words of a limit of the control group, none where it has no limit."""
    words = text_of(cgroup_folder() / name).split()
    return words if words[:1] != ["max"] else []


def memory_findings(seen: Memory) -> Iterator[Finding]:
    """Each with its values of what was seen."""

    def finding(subject: str, severity: Severity, found: str, *reasons: str, of: str) -> Finding:
        values = {name: getattr(seen, name) for name in of.split()}
        return Finding(f"memory.{subject}", severity, found, values, *reasons)

    yield finding(
        "segment",
        ERROR if seen.segment_error else OK,
        f"no sealed memfd: {seen.segment_error}" if seen.segment_error else "a memfd can be sealed",
        "Engines share their KV cache with their agent in one.",
        "Fix what the message says. The kernel must be Linux with memfd_create, and the sandbox or "
        "seccomp profile must allow it.",
        of="segment_error",
    )
    limit, quota = seen.group_limit_bytes, seen.cpu_quota
    limited = "" if limit is None else f"; the control group allows {bytes_text(limit)}"
    yield finding(
        "room",
        OK if seen.available_bytes >= GOOD_ROOM_BYTES else WARNING,
        f"{bytes_text(seen.available_bytes)} available of {bytes_text(seen.total_bytes)}{limited}",
        "KV caches and staging are reserved when they are made.",
        "Free memory, or raise the limit of the container.",
        of="available_bytes total_bytes group_limit_bytes",
    )
    yield finding(
        "shared_folder",
        OK if seen.folder_free_bytes >= GOOD_FOLDER_BYTES else NOTE,
        f"{FOLDER} has {bytes_text(seen.folder_free_bytes)} free of "
        f"{bytes_text(seen.folder_bytes)}",
        "Only torch tensors that an engine shares in place (share_tensor) go there; where an "
        "engine does, enlarge it (of a container with --shm-size)",
        of="folder_bytes folder_free_bytes",
    )
    word = f"'{seen.shmem_enabled}'" if seen.shmem_enabled else "not known to the kernel"
    yield finding(
        "huge_pages",
        OK if seen.free_huge_bytes > 0 or seen.shmem_enabled in GIVING_WORDS else NOTE,
        f"{bytes_text(seen.free_huge_bytes)} reserved and free; shmem_enabled is {word}",
        "Segments lie in small pages; large ones can be read faster.",
        'Let engines that ask for huge pages (huge_pages="advise") have them, or reserve some '
        "(vm.nr_hugepages) for those that ask for these (huge_pages=True).",
        f"echo advise > {SHMEM_ENABLED}",
        of="free_huge_bytes shmem_enabled",
    )
    usable = seen.num_cores if quota is None else min(seen.num_cores, int(quota))
    yield finding(
        "cores",
        OK if usable >= 2 else WARNING,
        f"{seen.num_cores} cores"
        + ("" if quota is None else f", limited to the time of {quota:g}"),
        "An agent's event loop and its NIXL thread wait for each other.",
        "Give it two cores or more.",
        of="num_cores cpu_quota",
    )
    yield finding(
        "copies",
        OK if seen.compiled else NOTE,
        f"mapped memory is copied by {'the kernel in C' if seen.compiled else 'numpy'}",
        "Agents of one machine copy KV, by numpy at two thirds of the speed at most.",
        "Install a C compiler, then kvbus again.",
        of="compiled",
    )


def check_limits() -> Iterator[Finding]:
    """Open files, locked memory, sizes of files: the soft limits of an agent started from here."""
    status = dict(line.split(":", 1) for line in text_of("/proc/self/status").splitlines())
    return limit_findings(
        *(_soft(f"RLIMIT_{name}") for name in ("NOFILE", "MEMLOCK", "FSIZE")),
        may_lock=bool(int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1),
        rdma_devices=rdma_devices(),
    )


def _soft(limit: str) -> int | None:
    """None is unlimited."""
    soft, _ = resource.getrlimit(getattr(resource, limit))
    return None if soft == resource.RLIM_INFINITY else soft


def limit_findings(
    files: int | None,
    locked_bytes: int | None,
    file_bytes: int | None,
    *,
    may_lock: bool,
    rdma_devices: Sequence[str],
) -> Iterator[Finding]:
    """Limits that are None are unlimited; with ``may_lock`` that of locked memory does not count.

    Of locked memory a warning at most: whether NIXL works in spite of it is measured.
    """
    severity = OK
    for least, worse in ((MANY_FILES, NOTE), (GOOD_FILES, WARNING), (LEAST_FILES, ERROR)):
        if files is not None and files < least:
            severity = worse
    yield Finding(
        "limits.open_files",
        severity,
        "unlimited" if files is None else f"at most {files:,}",
        {"open_files": files},
        why="Each peer of an agent costs several, and each segment two.",
        fix="Raise it where the agents are started (systemd: LimitNOFILE=).",
        command="ulimit -n 65536",
    )
    severity, found = OK, _at_most(locked_bytes)
    if not rdma_devices:
        found += "; there is no RDMA device, and nothing else needs it"
    elif locked_bytes is not None and may_lock:
        found += ", which CAP_IPC_LOCK overrides"
    elif locked_bytes is not None:
        severity, found = WARNING, f"{found}, with RDMA by {', '.join(rdma_devices)}"
    yield Finding(
        "limits.locked_memory",
        severity,
        found,
        {"locked_bytes": locked_bytes, "may_lock": may_lock, "rdma_devices": rdma_devices},
        why="RDMA pins all memory that is registered: KV caches and staging.",
        fix="Raise it where the agents are started (systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1).",
        command="ulimit -l unlimited",
    )
    yield Finding(
        "limits.file_size",
        OK if file_bytes is None or file_bytes >= GOOD_FILE_BYTES else WARNING,
        _at_most(file_bytes),
        {"file_bytes": file_bytes},
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
