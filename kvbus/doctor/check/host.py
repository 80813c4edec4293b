"""Says what of memory, limits and processes is a limit for kvbus on this machine."""

from collections.abc import Iterator

import msgspec

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, finding, picked
from kvbus.text import bytes_text

GOOD_ROOM_BYTES = 2 << 30
GOOD_FOLDER_BYTES = 1 << 30
"""Containers have 64 MiB if they are not told otherwise."""
FOLDER = "/dev/shm"  # noqa: S108 - where shm_open, and so torch, puts files
LEAST_FILES, GOOD_FILES, MANY_FILES = 64, 1024, 4096
GOOD_FILE_BYTES = 64 << 30
HUGE_WORDS = ("always", "within_size", "force")


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
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


class LimitFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The soft limits of a process of ours; None is unlimited.

    ``may_lock`` says that the process has CAP_IPC_LOCK, for which the limit does not count;
    ``rdma_devices`` are the names in /sys/class/infiniband.
    """

    open_files: int | None
    locked_bytes: int | None
    file_bytes: int | None
    may_lock: bool
    rdma_devices: tuple[str, ...]


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``error`` is empty when one process could read another's memory.

    ``ptrace_scope`` is Yama's, None where the kernel has none; ``may_trace`` says that we have
    CAP_SYS_PTRACE.
    """

    error: str
    ptrace_scope: int | None
    may_trace: bool


def check_memory(facts: MemoryFacts) -> Iterator[Finding]:
    """Segments, room, /dev/shm, huge pages, cores."""
    error = facts.segment_error
    yield finding(
        "memory.segment",
        ERROR if error else OK,
        f"no sealed memfd: {error}" if error else "a sealed memfd can be made",
        {"error": error} if error else {},
        why="Engines share their KV cache with their agent in one.",
        fix="Fix what the message says. The kernel must be Linux with memfd_create, and the "
        "sandbox or seccomp profile must allow it.",
    )
    limit, available = facts.group_limit_bytes, bytes_text(facts.available_bytes)
    limited = "" if limit is None else f"; the control group allows {bytes_text(limit)}"
    yield finding(
        "memory.room",
        OK if facts.available_bytes >= GOOD_ROOM_BYTES else WARNING,
        f"{available} available of {bytes_text(facts.total_bytes)}{limited}",
        picked(facts, "available_bytes", "total_bytes", "group_limit_bytes"),
        why="KV caches and staging are reserved when they are made.",
        fix="Free memory, or raise the limit of the container.",
    )
    yield _shared_folder(facts.folder_bytes, facts.folder_free_bytes)
    yield _huge_pages(facts)
    yield _cores(facts)


def _shared_folder(size_bytes: int | None, free_bytes: int | None) -> Finding:
    found = f"there is no {FOLDER}"
    if size_bytes is not None and free_bytes is not None:
        found = f"{FOLDER} has {bytes_text(free_bytes)} free of {bytes_text(size_bytes)}"
    return finding(
        "memory.shared_folder",
        OK if (free_bytes or 0) >= GOOD_FOLDER_BYTES else NOTE,
        found,
        {"size_bytes": size_bytes, "free_bytes": free_bytes},
        why="Only torch tensors that an engine shares in place (share_tensor) go there; the "
        "segments that kvbus allocates do not.",
        fix="Where an engine does, enlarge it; of a container with --shm-size.",
    )


def _huge_pages(facts: MemoryFacts) -> Finding:
    page_bytes, enabled = facts.huge_page_bytes, facts.shmem_huge
    free_bytes = facts.num_free_huge_pages * page_bytes
    word = f"'{enabled}'" if enabled else "not known to the kernel"
    return finding(
        "memory.huge_pages",
        OK if free_bytes > 0 or enabled in HUGE_WORDS else NOTE,
        f"{bytes_text(free_bytes)} reserved and free; shmem_enabled is {word}",
        {"free_bytes": free_bytes, "page_bytes": page_bytes, "shmem_enabled": enabled},
        why="Segments lie in small pages; large ones can be read faster.",
        fix="Let memfds use huge pages, or reserve some (vm.nr_hugepages).",
        command="echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _cores(facts: MemoryFacts) -> Finding:
    quota = facts.cpu_quota
    usable = facts.num_cores if quota is None else min(facts.num_cores, int(quota))
    limited = "" if quota is None else f", limited to the time of {quota:g}"
    return finding(
        "memory.cores",
        OK if usable >= 2 else WARNING,
        f"{facts.num_cores} cores{limited}",
        picked(facts, "num_cores", "cpu_quota"),
        why="An agent's event loop and its NIXL thread wait for each other.",
        fix="Give it two cores or more.",
    )


def check_limits(facts: LimitFacts) -> Iterator[Finding]:
    """Open files, locked memory, sizes of files."""
    limit, severity = facts.open_files, OK
    for least, worse in ((MANY_FILES, NOTE), (GOOD_FILES, WARNING), (LEAST_FILES, ERROR)):
        if limit is not None and limit < least:
            severity = worse
    yield finding(
        "limits.open_files",
        severity,
        "unlimited" if limit is None else f"at most {limit:,}",
        picked(facts, "open_files"),
        why="Each peer of an agent costs several, and each segment two.",
        fix="Raise it where the agents are started (systemd: LimitNOFILE=).",
        command="ulimit -n 65536",
    )
    yield _locked_memory(facts)
    is_good = facts.file_bytes is None or facts.file_bytes >= GOOD_FILE_BYTES
    yield finding(
        "limits.file_size",
        OK if is_good else WARNING,
        _at_most(facts.file_bytes),
        picked(facts, "file_bytes"),
        why="A KV cache in a memfd is a file, and no larger than that.",
        fix="Raise it where the engines are started.",
        command="ulimit -f unlimited",
    )


def _locked_memory(facts: LimitFacts) -> Finding:
    """A warning at most: whether NIXL works in spite of the limit is measured."""
    limit, devices = facts.locked_bytes, facts.rdma_devices
    severity, found = OK, _at_most(limit)
    if not devices:
        found += "; there is no RDMA device, and nothing else needs it"
    elif limit is not None and facts.may_lock:
        found += ", which CAP_IPC_LOCK overrides"
    elif limit is not None:
        severity, found = WARNING, f"{found}, with RDMA by {', '.join(devices)}"
    return finding(
        "limits.locked_memory",
        severity,
        found,
        picked(facts, "locked_bytes", "may_lock", "rdma_devices"),
        why="RDMA pins all memory that is registered: KV caches and staging.",
        fix="Raise it where the agents are started (systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1).",
        command="ulimit -l unlimited",
    )


def _at_most(num_bytes: int | None) -> str:
    return "unlimited" if num_bytes is None else f"at most {bytes_text(num_bytes)}"


def check_processes(facts: ProcessFacts) -> Iterator[Finding]:
    """Processes that read each other's memory, as UCX does (CMA); settings only explain it."""
    found, fix, command = "one process can read another's memory (CMA)", "", ""
    if facts.error:
        found = f"one process cannot read another's memory (CMA): {facts.error}"
        fix = (
            "Allow it in the sandbox: docker --cap-add SYS_PTRACE, or a seccomp profile with "
            "process_vm_readv; agents in different containers need one PID namespace."
        )
    if (facts.ptrace_scope or 0) > 1:
        fix = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: set it to 1 or 0."
        command = "sysctl kernel.yama.ptrace_scope=1"
    yield finding(
        "processes.read_memory",
        WARNING if facts.error else OK,
        found,
        msgspec.structs.asdict(facts),
        why="UCX copies between processes of this machine that way; otherwise it goes over TCP.",
        fix=fix,
        command=command,
    )
