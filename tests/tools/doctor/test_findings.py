"""The finding to each fact of a machine, good or bad; this machine does not matter."""

from typing import Any

import pytest

from kvbus.agent.probe import MeasuredRead
from kvbus.doctor import data_plane, gpus, host
from tests.tools.doctor.running import check_finding

MIB = 1 << 20
REFUSED = "Operation not permitted"
OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
Finding = Any


GOOD: dict[str, Any] = {"num_cores": 16, "cpu_quota": None, "compiled": True}


def memory(subject: str, segment_error: str = "", **seen: Any) -> Finding:
    """The finding on a machine that is good but for ``seen``."""
    found = host.memory_findings(segment_error, **{**GOOD, **seen})
    return next(one for one in found if one.name == f"memory.{subject}")


def limit(
    subject: str, *limits: int, may_lock: bool = False, rdma: tuple[str, ...] = ("mlx5_0",)
) -> Finding:
    files, locked = (*limits, None, None)[:2]
    found = host.limit_findings(files, locked, may_lock=may_lock, rdma_devices=rdma)
    return next(one for one in found if one.name == f"limits.{subject}")


def read(way: str, bytes_per_s: float, wire: str = "", tls: str = "", scope: str = "1") -> Finding:
    return data_plane.read_finding(way, tls, measured(bytes_per_s, wire), scope)


def measured(bytes_per_s: float, wire: str, *, is_emulated: bool = False) -> MeasuredRead:
    return MeasuredRead(bytes_per_s, wire, is_emulated, "" if bytes_per_s else "it hung")


def vram(bytes_per_s: float, wire: str, *, is_emulated: bool = False) -> Finding:
    return gpus.vram_finding("rdma", measured(bytes_per_s, wire, is_emulated=is_emulated))


OVER_BOTH = "52% on tcp/eth0 and 48% on tcp/lo"

ROWS: list[tuple[Finding, str, str, str, str]] = [
    (memory("segment", segment_error=REFUSED), "memory.segment", ERROR, REFUSED, ""),
    (memory("cores"), "memory.cores", OK, "16 cores", ""),
    (memory("cores", cpu_quota=1.5), "memory.cores", WARNING, "limited to the time of 1.5", ""),
    (memory("copies", compiled=False), "memory.copies", NOTE, "numpy", ""),
    (limit("open_files", 1024), "limits.open_files", NOTE, "1,024", "ulimit -n"),
    (limit("open_files", 1023), "limits.open_files", WARNING, "1,023", "ulimit -n"),
    (limit("open_files", 63), "limits.open_files", ERROR, "63", "ulimit -n"),
    (limit("locked_memory", 0, MIB, rdma=()), "limits.locked_memory", OK, "no RDMA device", ""),
    (limit("locked_memory", 0, MIB), "limits.locked_memory", WARNING, "mlx5_0", "ulimit -l"),
    (limit("locked_memory", 0, MIB, may_lock=True), "limits.locked_memory", OK, "IPC_LOCK", ""),
    (read("configured", 9e9, "cma/memory"), "nixl.read.configured", OK, "9 GB/s over cma/memo", ""),
    (read("configured", 0), "nixl.read.configured", ERROR, "it hung", "env | grep ^UCX_"),
    (read("configured", 1e9, OVER_BOTH), "nixl.read.configured", WARNING, "over 52% on tcp", ""),
    (read("configured", 1e9, "tcp/lo", "tcp"), "nixl.read.configured", WARNING, "tcp/lo", "unset"),
    (read("configured", 1e9, "tcp/lo", "", "2"), "nixl.read.configured", WARNING, "1 G", "sysctl"),
    (read("tcp", 13e8, "tcp/lo", "tcp"), "nixl.read.tcp", OK, "1.3 GB/s over tcp/lo (UCX_T", ""),
    (read("tcp", 0, "", "tcp"), "nixl.read.tcp", WARNING, "fails (UCX_TLS=tcp): it hung", ""),
    (vram(4e10, "rc_mlx5/mlx5_0:1"), "cuda.read.rdma", OK, "40 GB/s from GPU memory over rc_", ""),
    (
        vram(2e9, "rc/m:1", is_emulated=True),
        "cuda.read.rdma",
        WARNING,
        "emulated by the CPU",
        "env",
    ),
    (vram(0, ""), "cuda.read.rdma", WARNING, "fails: it hung", "env"),
    (read("rdma", 4e10, "rc_mlx5/mlx5_0:1", "ib"), "nixl.read.rdma", OK, "40 GB/s over rc_ml", ""),
]


@pytest.mark.parametrize(
    ("found", "name", "severity", "phrase", "command"),
    ROWS,
    ids=[f"{name}-{severity}-{n}" for n, (_, name, severity, *_) in enumerate(ROWS)],
)
def test_a_machine_has_the_findings_of_its_facts(
    found: Finding, name: str, severity: str, phrase: str, command: str
) -> None:
    assert (found.name, found.severity) == (name, severity)
    assert phrase in found.found
    assert found.command.startswith(command)
    told = {key: getattr(found, key) for key in ("family", "found", "why", "fix", "command")}
    check_finding(found.name, {**told, "severity": str(found.severity)})
