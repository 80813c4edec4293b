"""What is said of machines: the finding to each fact, on good ones and on bad ones.

What this machine is like is no matter here.
"""

from typing import Any

import pytest

from kvbus.doctor import cuda, host, nixl
from kvbus.doctor.process import Gpu, GpuList
from tests.doctor.running import check_finding

MIB, GIB = 1 << 20, 1 << 30
REFUSED = "Operation not permitted"
GPU = GpuList("13.0", (Gpu(uuid="GPU-1", name="H200", memory_bytes=139 << 30),))
NO_GPU = GpuList("", ())
OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
Finding = Any


def room(available_bytes: int) -> Finding:
    return host.room_finding(available_bytes, total_bytes=64 * GIB, group_limit_bytes=3 * GIB)


def locked(limit: int | None, may_lock: bool, *rdma_devices: str) -> Finding:
    return host.locked_memory_finding(limit, may_lock=may_lock, rdma_devices=rdma_devices)


def reading(error: str, scope: int | None) -> Finding:
    return host.reading_finding(error, ptrace_scope=scope, may_trace=False)


def gpus(seen: GpuList, error: str) -> Finding:
    return cuda.gpus_finding(seen, error, num_devices=1, driver="570.86", torch_version="2.13.0")


ROWS: list[tuple[Finding, str, str, str, str]] = [
    (host.segment_finding(REFUSED), "memory.segment", ERROR, REFUSED, ""),
    (room(2 * GIB), "memory.room", OK, "the control group allows 3 GiB", ""),
    (room(2 * GIB - 1), "memory.room", WARNING, "available of 64 GiB", ""),
    (host.folder_finding(32 * GIB, 64 * MIB), "memory.shared_folder", NOTE, "64 MiB free", ""),
    (host.huge_page_finding(0, 2 * MIB, "advise"), "memory.huge_pages", OK, "advise", ""),
    (host.huge_page_finding(0, 2 * MIB, "never"), "memory.huge_pages", NOTE, "never", "echo adv"),
    (host.core_finding(16, None), "memory.cores", OK, "16 cores", ""),
    (host.core_finding(16, 1.5), "memory.cores", WARNING, "limited to the time of 1.5", ""),
    (host.kernel_finding(compiled=False), "memory.copies", NOTE, "numpy", ""),
    (host.open_files_finding(1024), "limits.open_files", NOTE, "1,024", "ulimit -n"),
    (host.open_files_finding(1023), "limits.open_files", WARNING, "1,023", "ulimit -n"),
    (host.open_files_finding(63), "limits.open_files", ERROR, "63", "ulimit -n"),
    (locked(8 * MIB, False), "limits.locked_memory", OK, "no RDMA device", ""),
    (locked(8 * MIB, False, "mlx5_0"), "limits.locked_memory", WARNING, "mlx5_0", "ulimit -l"),
    (locked(8 * MIB, True, "mlx5_0"), "limits.locked_memory", OK, "CAP_IPC_LOCK overrides", ""),
    (host.file_size_finding(GIB), "limits.file_size", WARNING, "1 GiB", "ulimit -f"),
    (reading(REFUSED, 2), "processes.read_memory", WARNING, REFUSED, "sysctl kernel.yama.ptrace_"),
    (gpus(GPU, ""), "cuda.gpus", OK, "H200", ""),
    (gpus(NO_GPU, "torch is built without CUDA"), "cuda.gpus", WARNING, "without CUDA", "python"),
    (cuda.no_gpu_finding("2.13.0"), "cuda.gpus", NOTE, "not checked", ""),
    (cuda.ipc_finding("invalid context"), "cuda.ipc", WARNING, "invalid context", ""),
    (cuda.allocator_finding("a:1, expandable_segments: True"), "cuda.allocator", WARNING, "ex", ""),
]


def check(one: Finding) -> None:
    told = {key: getattr(one, key) for key in ("family", "found", "why", "fix", "command")}
    check_finding(one.name, {**told, "severity": str(one.severity)})


@pytest.mark.parametrize(
    ("found", "name", "severity", "phrase", "command"),
    ROWS,
    ids=[f"{name}-{severity}-{n}" for n, (_, name, severity, *_) in enumerate(ROWS)],
)
def test_a_machine_is_complained_of_by_what_it_costs(
    found: Finding, name: str, severity: str, phrase: str, command: str
) -> None:
    assert (found.name, found.severity) == (name, severity)
    assert phrase in found.found
    assert found.command.startswith(command)
    check(found)


def read(way: str, rate: float | None, wire: str = "", tls: str = "") -> nixl.ReadFacts:
    error = "" if rate else "it hung"
    choice = nixl.UcxChoice(way)
    return nixl.ReadFacts(way=choice, ucx_tls=tls, bytes_per_s=rate, wire=wire, error=error)


FAST = read("configured", 9e9, "cma/memory")
SLOW = read("configured", 1.3e9, "52% on tcp/eth0 and 48% on tcp/lo")
TCP = read("tcp", 1.3e9, "tcp/lo", "tcp")
RDMA = read("rdma", 40e9, "rc_mlx5/mlx5_0:1", "ib")


@pytest.mark.parametrize(
    ("reads", "wanted"),
    [
        (
            [FAST, TCP],
            {"one_machine": (OK, "cma/memory, 9 GB/s"), "two_machines": (NOTE, "only: 1.3 GB/s")},
        ),
        (
            [FAST, TCP, RDMA],
            {"one_machine": (OK, "rc_mlx5"), "two_machines": (OK, "by RDMA; 40 GB/s")},
        ),
        (
            [FAST, read("tcp", None)],
            {"two_machines": (WARNING, "cannot be reached"), "read.tcp": (WARNING, "it hung")},
        ),
        ([SLOW, TCP], {"one_machine": (WARNING, "read over TCP"), "two_machines": (NOTE, "TCP")}),
        (
            [read("configured", None), TCP],
            {"one_machine": (OK, "tcp/lo"), "read.configured": (ERROR, "it hung")},
        ),
    ],
    ids=["usual", "rdma", "no-tcp", "slow", "not-as-configured"],
)
def test_what_was_read_says_how_agents_of_one_machine_and_of_two_are_reached(
    reads: list[nixl.ReadFacts], wanted: dict[str, tuple[str, str]]
) -> None:
    found = {one.name.removeprefix("nixl."): one for one in nixl.read_findings(reads)}

    for name, (severity, phrase) in wanted.items():
        assert found[name].severity == severity
        assert phrase in found[name].found
    for one in found.values():
        check(one)
