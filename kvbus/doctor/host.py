"""Checks of versions, memory and limits of this machine.

Findings are functions of the observed values, so that tests can simulate any machine.
"""

import os
import platform
import resource
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.errors import SegmentError
from kvbus.memory.memory_limits import cgroup_folder
from kvbus.memory.run_copy import is_compiled
from kvbus.memory.segment import SharedSegment
from kvbus.text import bytes_text

PROJECT, NAMED = "kvbus", ("nixl", "torch", "pyzmq", "numpy")
SEGMENT_BYTES = 1 << 20
LEAST_FILES, GOOD_FILES, MANY_FILES = 64, 1024, 4096
_CAP_IPC_LOCK = 14


def check_versions() -> Iterator[Finding]:
    right: dict[str, str] = {}
    for one in map(Requirement, requires(PROJECT) or []):
        if one.marker is not None and not one.marker.evaluate({"extra": "agent"}):
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
    named_versions = ", ".join([f"Python {platform.python_version()}", *named])
    found = f"as required: {named_versions}, {len(right) - len(named)} more"
    yield Finding("versions.packages", OK, found, {"python": platform.python_version(), **right})


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def check_memory() -> Iterator[Finding]:
    quota = text_of(cgroup_folder() / "cpu.max").split()
    try:
        SharedSegment(SEGMENT_BYTES, name="kvbus-doctor").close()
        segment_error = ""
    except (SegmentError, OSError) as error:
        segment_error = str(error)
    return memory_findings(
        segment_error,
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=int(quota[0]) / int(quota[1]) if quota and quota[0] != "max" else None,
        compiled=is_compiled(),
    )


def memory_findings(
    segment_error: str, *, num_cores: int, cpu_quota: float | None, compiled: bool
) -> Iterator[Finding]:
    """``segment_error`` is empty if a sealed segment could be created."""
    yield Finding(
        "memory.segment",
        ERROR if segment_error else OK,
        f"no sealed memfd: {segment_error}" if segment_error else "a memfd can be sealed",
        {"segment_error": segment_error},
        why="Engines share their KV cache with their agent in one.",
        fix="Fix the cause that the message names. The kernel must be Linux with memfd_create, "
        "and the sandbox or seccomp profile must allow it.",
    )
    usable, limited = num_cores, ""
    if cpu_quota is not None:
        usable, limited = min(num_cores, int(cpu_quota)), f", limited to the time of {cpu_quota:g}"
    yield Finding(
        "memory.cores",
        OK if usable >= 2 else WARNING,
        f"{num_cores} cores{limited}",
        {"num_cores": num_cores, "cpu_quota": cpu_quota},
        why="The control process and the data process of an agent wait for each other.",
        fix="Give it two cores or more.",
    )
    yield Finding(
        "memory.copies",
        OK if compiled else NOTE,
        f"mapped memory is copied by {'the kernel in C' if compiled else 'numpy'}",
        {"compiled": compiled},
        why="Agents of one machine copy KV, by numpy at two thirds of the speed at most.",
        fix="Install a C compiler, then kvbus again.",
    )


def check_limits() -> Iterator[Finding]:
    status = dict(line.split(":", 1) for line in text_of("/proc/self/status").splitlines())
    return limit_findings(
        _soft("RLIMIT_NOFILE"),
        _soft("RLIMIT_MEMLOCK"),
        may_lock=bool(int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1),
        rdma_devices=rdma_devices(),
    )


def _soft(limit: str) -> int | None:
    """Return None if it is unlimited."""
    soft, _ = resource.getrlimit(getattr(resource, limit))
    return None if soft == resource.RLIM_INFINITY else soft


def limit_findings(
    files: int | None,
    locked_bytes: int | None,
    *,
    may_lock: bool,
    rdma_devices: Sequence[str],
) -> Iterator[Finding]:
    """Too little locked memory is only a warning, because `check_nixl` measures its effect."""
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
    severity = OK
    found = "unlimited" if locked_bytes is None else f"at most {bytes_text(locked_bytes)}"
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


def text_of(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def rdma_devices() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*")))
