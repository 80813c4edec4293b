"""What is said of machines: the finding to each fact, on good ones and on bad ones.

A row has what was found out of a machine, and the severity, a key phrase and the command of what is
said then. What this machine is like is no matter here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from kvbus.doctor import cuda, host, nixl
from kvbus.doctor.process import Gpu, GpuList
from tests.doctor.running import check_finding

MIB, GIB = 1 << 20, 1 << 30
REFUSED = "Operation not permitted"
GPU = GpuList("13.0", (Gpu(uuid="GPU-1", name="H200", memory_bytes=139 << 30),))
OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
Finding = Any
Row = tuple[Finding, str, str, str, str]


def rows_of(
    name: str, make: Callable[..., Finding], *rows: tuple[tuple[object, ...], str, str, str]
) -> Iterator[Row]:
    for facts, severity, phrase, command in rows:
        yield make(*facts), name, severity, phrase, command


def room(available_bytes: int) -> Finding:
    return host.room_finding(available_bytes, total_bytes=64 * GIB, group_limit_bytes=3 * GIB)


def locked(limit: int | None, may_lock: bool, *rdma_devices: str) -> Finding:
    return host.locked_memory_finding(limit, may_lock=may_lock, rdma_devices=rdma_devices)


def reading(error: str, scope: int | None) -> Finding:
    return host.reading_finding(error, ptrace_scope=scope, may_trace=False)


def copies(compiled: bool) -> Finding:
    return host.kernel_finding(compiled=compiled)


def gpus(seen: GpuList, error: str) -> Finding:
    return cuda.gpus_finding(seen, error, num_devices=1, driver="570.86", torch_version="2.13.0")


ROWS: list[Row] = [
    *rows_of(
        "memory.segment",
        host.segment_finding,
        (("",), OK, "can be made", ""),
        ((REFUSED,), ERROR, REFUSED, ""),
    ),
    *rows_of(
        "memory.room",
        room,
        ((2 * GIB,), OK, "the control group allows 3 GiB", ""),
        ((2 * GIB - 1,), WARNING, "available of 64 GiB", ""),
    ),
    *rows_of(
        "memory.shared_folder",
        host.folder_finding,
        ((32 * GIB, 32 * GIB), OK, "32 GiB free", ""),
        ((32 * GIB, 64 * MIB), NOTE, "64 MiB free", ""),
        ((None, None), NOTE, "there is no /dev/shm", ""),
    ),
    *rows_of(
        "memory.huge_pages",
        host.huge_page_finding,
        ((0, 2 * MIB, "within_size"), OK, "within_size", ""),
        ((1, 2 * MIB, "never"), OK, "2 MiB reserved", ""),
        ((0, 2 * MIB, "never"), NOTE, "never", "echo advise >"),
        ((0, 0, ""), NOTE, "not known to the kernel", "echo advise >"),
    ),
    *rows_of(
        "memory.cores",
        host.core_finding,
        ((16, None), OK, "16 cores", ""),
        ((16, 2.0), OK, "limited to the time of 2", ""),
        ((16, 1.5), WARNING, "limited to the time of 1.5", ""),
        ((1, None), WARNING, "1 cores", ""),
    ),
    *rows_of(
        "memory.copies",
        copies,
        ((True,), OK, "kernel in C", ""),
        ((False,), NOTE, "numpy", ""),
    ),
    *rows_of(
        "limits.open_files",
        host.open_files_finding,
        ((None,), OK, "unlimited", ""),
        ((4096,), OK, "4,096", ""),
        ((1024,), NOTE, "1,024", "ulimit -n"),
        ((1023,), WARNING, "1,023", "ulimit -n"),
        ((63,), ERROR, "63", "ulimit -n"),
    ),
    *rows_of(
        "limits.locked_memory",
        locked,
        ((8 * MIB, False), OK, "no RDMA device", ""),
        ((8 * MIB, False, "mlx5_0"), WARNING, "mlx5_0", "ulimit -l"),
        ((8 * MIB, True, "mlx5_0"), OK, "CAP_IPC_LOCK overrides", ""),
        ((None, False, "mlx5_0"), OK, "unlimited", ""),
    ),
    *rows_of(
        "limits.file_size",
        host.file_size_finding,
        ((None,), OK, "unlimited", ""),
        ((GIB,), WARNING, "1 GiB", "ulimit -f"),
    ),
    *rows_of(
        "processes.read_memory",
        reading,
        (("", 1), OK, "can read", ""),
        ((REFUSED, 2), WARNING, REFUSED, "sysctl kernel.yama.ptrace_scope=1"),
        ((REFUSED, 1), WARNING, REFUSED, ""),
        ((REFUSED, None), WARNING, REFUSED, ""),
    ),
    *rows_of(
        "cuda.gpus",
        gpus,
        ((GPU, ""), OK, "H200", ""),
        ((GpuList("", ()), "torch is built without CUDA"), WARNING, "built without CUDA", "python"),
    ),
    *rows_of("cuda.gpus", cuda.no_gpu_finding, (("2.13.0",), NOTE, "not checked", "")),
    *rows_of(
        "cuda.ipc",
        cuda.ipc_finding,
        (("",), OK, "read by another", ""),
        (("invalid device context",), WARNING, "invalid device context", ""),
    ),
    *rows_of(
        "cuda.allocator",
        cuda.allocator_finding,
        (("",), OK, "", ""),
        (("max_split_size_mb:64",), OK, "", ""),
        (("a:1, expandable_segments: True",), WARNING, "expandable_segments", ""),
    ),
]


def check(one: Finding) -> None:
    check_finding(
        one.name,
        {
            "family": one.family,
            "severity": str(one.severity),
            **{key: getattr(one, key) for key in ("found", "why", "fix", "command")},
        },
    )


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
TCP = read("tcp", 1.3e9, "tcp/lo", "tcp")
RDMA = read("rdma", 40e9, "rc_mlx5/mlx5_0:1", "ib")


@pytest.mark.parametrize(
    ("reads", "one_machine", "two_machines"),
    [
        ([FAST, TCP], (OK, "cma/memory, 9 GB/s"), (NOTE, "TCP only: 1.3 GB/s")),
        ([FAST, TCP, RDMA], (OK, "rc_mlx5"), (OK, "by RDMA; 40 GB/s")),
        ([FAST, read("tcp", None)], (OK, "cma/memory"), (WARNING, "cannot be reached")),
        (
            [read("configured", 1.3e9, "tcp/lo", "tcp"), TCP],
            (WARNING, "read over TCP"),
            (NOTE, "TCP only"),
        ),
        (
            [read("configured", 1.3e9, "52% on tcp/eth0 and 48% on tcp/lo"), TCP],
            (WARNING, "read over TCP"),
            (NOTE, "TCP only"),
        ),
        ([read("configured", None), TCP], (OK, "tcp/lo"), (NOTE, "TCP only")),
        ([read("configured", None)], None, None),
    ],
)
def test_what_was_read_says_how_agents_of_one_machine_and_of_two_are_reached(
    reads: list[nixl.ReadFacts],
    one_machine: tuple[str, str] | None,
    two_machines: tuple[str, str] | None,
) -> None:
    found = {one.name: one for one in nixl.read_findings(reads)}

    for name, wanted in (("nixl.one_machine", one_machine), ("nixl.two_machines", two_machines)):
        assert (name in found) == (wanted is not None)
        if wanted is not None:
            assert found[name].severity == wanted[0]
            assert wanted[1] in found[name].found
    for one in found.values():
        check(one)


@pytest.mark.parametrize(
    ("way", "expected"), [("configured", ERROR), ("tcp", WARNING), ("rdma", WARNING)]
)
def test_a_way_that_fails_is_fatal_only_if_agents_are_told_to_go_it(
    way: str, expected: str
) -> None:
    others = [one for one in (FAST, TCP) if one.way != way]

    found = {one.name: one for one in nixl.read_findings([*others, read(way, None)])}

    assert found[f"nixl.read.{way}"].severity == expected
    assert "it hung" in found[f"nixl.read.{way}"].found


def table(title: str, *rows: str) -> Iterable[str]:
    """As UCX_PROTO_INFO prints it."""
    lines = ["+---+", f"| {title} |", "+---+", "| Range | Description | Config |", "+---+"]
    for line in (*lines, *(f"| {row} |" for row in rows), "+---+"):
        yield f"[1795253608.408744] [vm:342  :0]   {line}"


READ, SEND = "remote memory read by ucp_get*(multi) into host memory", "active message by ucp_am_"
SHORT, COPY, TCP_COPY = "0..99 | short | rc", "100..inf | zero | cma/memory", "0..inf | z | tcp/lo"


@pytest.mark.parametrize(
    ("tables", "wire"),
    [
        (
            [table(SEND, TCP_COPY), table(READ, SHORT, COPY)],
            "cma/memory",
        ),
        ([table(READ, SHORT, COPY), table("remote memory write", TCP_COPY)], "cma/memory"),
        ([table(READ, TCP_COPY), table(READ, COPY)], "cma/memory"),
        ([table(READ, COPY), table(READ, TCP_COPY)], "tcp/lo"),
        ([["nothing | of | that"]], ""),
    ],
    ids=["after-others", "before-others", "changed", "changed-back", "none"],
)
def test_the_wire_is_that_of_the_last_table_of_large_reads(
    tables: list[Iterable[str]], wire: str
) -> None:
    log = "\n".join(line for lines in tables for line in lines)

    assert nixl.wire_in(log) == wire
