"""Owns what is said about the limits of a process: open files, locked memory, sizes of files.

Refuses to complain of locked memory where nothing pins it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.doctor.finding import Finding, Severity
from kvbus.text import bytes_text

LEAST_FILES = 64
GOOD_FILES = 1024
MANY_FILES = 4096
GOOD_FILE_BYTES = 64 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFacts:
    """The soft limits of a process of ours; None is unlimited.

    ``may_lock`` says that the process has CAP_IPC_LOCK, for which the limit does not count;
    ``rdma_devices`` are the names in /sys/class/infiniband.
    """

    open_files: int | None
    locked_bytes: int | None
    file_bytes: int | None
    may_lock: bool
    rdma_devices: tuple[str, ...]


def judge_limits(facts: LimitFacts) -> Iterator[Finding]:
    """Open files, locked memory, sizes of files."""
    yield _open_files(facts)
    yield _locked(facts)
    yield _file_size(facts)


def _open_files(facts: LimitFacts) -> Finding:
    limit = facts.open_files
    severity = Severity.OK
    if limit is not None and limit < MANY_FILES:
        severity = Severity.NOTE
    if limit is not None and limit < GOOD_FILES:
        severity = Severity.WARNING
    if limit is not None and limit < LEAST_FILES:
        severity = Severity.ERROR
    is_good = severity is Severity.OK
    return Finding(
        name="limits.open_files",
        severity=severity,
        found="unlimited" if limit is None else f"at most {limit:,}",
        why="" if is_good else "Each peer of an agent costs several, and each segment two.",
        mend="" if is_good else "Raise it where the agents are started (systemd: LimitNOFILE=).",
        command="" if is_good else "ulimit -n 65536",
        values={"open_files": limit},
    )


def _locked(facts: LimitFacts) -> Finding:
    limit, devices = facts.locked_bytes, facts.rdma_devices
    shown = "unlimited" if limit is None else f"at most {bytes_text(limit)}"
    values = {"locked_bytes": limit, "may_lock": facts.may_lock, "rdma_devices": list(devices)}
    name = "limits.locked_memory"
    if not devices:
        found = f"{shown}; there is no RDMA device, and nothing else needs it"
        return Finding(name=name, severity=Severity.OK, found=found, values=values)
    if limit is None or facts.may_lock:
        found = shown if limit is None else f"{shown}, which CAP_IPC_LOCK overrides"
        return Finding(name=name, severity=Severity.OK, found=found, values=values)
    return Finding(
        name=name,
        severity=Severity.WARNING,  # whether NIXL works in spite of it is measured
        found=f"{shown}, with RDMA by {', '.join(devices)}",
        why="RDMA pins all memory that is registered: KV caches and staging.",
        mend="Lift it where the agents are started (systemd: LimitMEMLOCK=infinity; "
        "docker: --ulimit memlock=-1).",
        command="ulimit -l unlimited",
        values=values,
    )


def _file_size(facts: LimitFacts) -> Finding:
    limit = facts.file_bytes
    is_good = limit is None or limit >= GOOD_FILE_BYTES
    return Finding(
        name="limits.file_size",
        severity=Severity.OK if is_good else Severity.WARNING,
        found="unlimited" if limit is None else f"at most {bytes_text(limit)}",
        why="" if is_good else "A KV cache in a memfd is a file, and no larger than that.",
        mend="" if is_good else "Lift it where the engines are started.",
        command="" if is_good else "ulimit -f unlimited",
        values={"file_bytes": limit},
    )
