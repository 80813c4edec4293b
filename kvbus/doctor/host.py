"""Says what of memory, limits and processes is a limit for kvbus on this machine.

Refuses to raise a limit, and to reserve what a KV cache needs.
"""

import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbus.doctor.children import PROBE, Budget, run_pair
from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.errors import SegmentError
from kvbus.memory.room import available_bytes, cgroup_folder
from kvbus.memory.run_copy import is_compiled
from kvbus.memory.segment import GIVING_WORDS, SHMEM_ENABLED, SharedSegment, shmem_word
from kvbus.text import bytes_text

SEGMENT_BYTES = 1 << 20
GOOD_ROOM_BYTES = 2 << 30
GOOD_FOLDER_BYTES = 1 << 30
"""Containers have 64 MiB if they are not told otherwise."""
FOLDER = "/dev/shm"  # noqa: S108 - where shm_open, and so torch, puts files
LEAST_FILES, GOOD_FILES, MANY_FILES = 64, 1024, 4096
GOOD_FILE_BYTES = 64 << 30

_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def check_memory() -> Iterator[Finding]:
    """Segments, room, /dev/shm, huge pages, cores, copies: as a new process would have them."""
    meminfo = dict(line.split(":", 1) for line in text_of("/proc/meminfo").splitlines())
    fields = {name: int(value.split()[0]) for name, value in meminfo.items()}
    limit, quota = _group_words("memory.max"), _group_words("cpu.max")
    yield segment_finding(_segment_error())
    total, limit_bytes = fields["MemTotal"] * 1024, int(limit[0]) if limit else None
    yield room_finding(available_bytes(), total_bytes=total, group_limit_bytes=limit_bytes)
    folder = os.statvfs(FOLDER) if Path(FOLDER).is_dir() else None
    yield folder_finding(
        folder.f_blocks * folder.f_frsize if folder else None,
        folder.f_bavail * folder.f_frsize if folder else None,
    )
    page_bytes = fields.get("Hugepagesize", 0) * 1024
    yield huge_page_finding(fields.get("HugePages_Free", 0), page_bytes, shmem_word())
    cpu_quota = int(quota[0]) / int(quota[1]) if quota else None
    yield core_finding(len(os.sched_getaffinity(0)), cpu_quota)
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
        {"error": error} if error else {},
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


def folder_finding(size_bytes: int | None, free_bytes: int | None) -> Finding:
    """Of `FOLDER`, None where there is none."""
    found = f"there is no {FOLDER}"
    if size_bytes is not None and free_bytes is not None:
        found = f"{FOLDER} has {bytes_text(free_bytes)} free of {bytes_text(size_bytes)}"
    return Finding(
        "memory.shared_folder",
        OK if (free_bytes or 0) >= GOOD_FOLDER_BYTES else NOTE,
        found,
        {"size_bytes": size_bytes, "free_bytes": free_bytes},
        why="Only torch tensors that an engine shares in place (share_tensor) go there; the "
        "segments that kvbus allocates do not.",
        fix="Where an engine does, enlarge it; of a container with --shm-size.",
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
    locked_bytes, may_lock = _soft(resource.RLIMIT_MEMLOCK), _has_capability(_CAP_IPC_LOCK)
    yield locked_memory_finding(locked_bytes, may_lock=may_lock, rdma_devices=rdma_devices())
    yield file_size_finding(_soft(resource.RLIMIT_FSIZE))


def _soft(limit: int) -> int | None:
    """None is unlimited."""
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


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
    """A warning at most: whether NIXL works in spite of the limit is measured.

    ``may_lock`` says that the process has CAP_IPC_LOCK, for which the limit does not count.
    """
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


def check_processes(budget: Budget) -> Iterator[Finding]:
    """Two processes, and the settings that explain what came of it."""
    scope = text_of(_PTRACE_SCOPE)
    yield reading_finding(
        run_pair(PROBE, "memory", env={}, budget=budget).failure,
        ptrace_scope=int(scope) if scope else None,
        may_trace=_has_capability(_CAP_SYS_PTRACE),
    )


def reading_finding(error: str, *, ptrace_scope: int | None, may_trace: bool) -> Finding:
    """Processes that read each other's memory, as UCX does (CMA); settings only explain it.

    ``ptrace_scope`` is Yama's, None where the kernel has none; ``may_trace`` says that we have
    CAP_SYS_PTRACE.
    """
    found, fix, command = "one process can read another's memory (CMA)", "", ""
    if error:
        found = f"one process cannot read another's memory (CMA): {error}"
        fix = (
            "Allow it in the sandbox: docker --cap-add SYS_PTRACE, or a seccomp profile with "
            "process_vm_readv; agents in different containers need one PID namespace."
        )
    if (ptrace_scope or 0) > 1:
        fix = f"kernel.yama.ptrace_scope is {ptrace_scope}: set it to 1 or 0."
        command = "sysctl kernel.yama.ptrace_scope=1"
    return Finding(
        "processes.read_memory",
        WARNING if error else OK,
        found,
        {"error": error, "ptrace_scope": ptrace_scope, "may_trace": may_trace},
        why="UCX copies between processes of this machine that way; otherwise it goes over TCP.",
        fix=fix,
        command=command,
    )


def text_of(path: Path | str) -> str:
    """What a file of the kernel says; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def rdma_devices() -> tuple[str, ...]:
    """The names of the RDMA devices of this machine."""
    return tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))


def _has_capability(number: int) -> bool:
    """Whether this process has a capability of Linux."""
    lines = dict(line.split(":", 1) for line in text_of("/proc/self/status").splitlines())
    return bool(int(lines["CapEff"], 16) >> number & 1)
