"""Whether NIXL reads, how fast and over what, and whether processes share memory of GPUs.

All of it is measured between two processes of this machine, which are nothing else of kvbus: what
may crash takes its own process along, and a loopback is not the network.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.doctor.host import installed, rdma_devices, text_of
from kvbus.doctor.probe import GpuMemory, run_pair
from kvbus.output import waiting_for
from kvbus.text import rate_text

CONFIGURED, TCP, RDMA = "configured", "tcp", "rdma"
UCX_TLS = {TCP: "tcp", RDMA: "ib"}
WHY_AND_FIX = {
    CONFIGURED: (
        "Agents that are started from here move all bytes with NIXL and UCX, and cannot read.",
        "Install NIXL as required, see versions.nixl; of several installations of UCX, "
        "LD_LIBRARY_PATH may have chosen another. Look at the UCX_ settings of the environment; "
        "without any UCX chooses. "
        "UCX_TLS=sm,self cannot work, as shared memory alone cannot report a dead peer: add tcp.",
    ),
    TCP: (
        "TCP is the way to other machines where there is no RDMA.",
        "See that a network interface is up (lo for agents of one machine) and that "
        "UCX_NET_DEVICES names one that is there.",
    ),
    RDMA: (
        "There are RDMA devices, and agents would not use them.",
        "See limits.locked_memory; check the port (ibv_devinfo), and that /dev/infiniband "
        "is in the container.",
    ),
}
"""For a read that failed."""
_TELL = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "info",
    "UCX_LOG_FILE": "stderr",
    "UCX_PROTO_INFO": "y",
}
_UCX_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_READ_TABLE = "remote memory read by ucp_get"
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True, slots=True)
class Read:
    """One measurement; ``bytes_per_s`` is 0 when it failed, and ``wire`` what UCX read over.

    ``ucx_tls`` is what UCX was told, empty when it could choose.
    """

    way: str
    ucx_tls: str
    bytes_per_s: float
    wire: str = ""
    error: str = ""
    ucx_version: str = ""


def check_nixl(limit_s: float) -> Iterator[Finding]:
    """How fast NIXL reads, with UCX as it is configured here, or by one kind of transport."""
    for way in WHY_AND_FIX:
        if way == RDMA and not rdma_devices():
            continue
        tls = UCX_TLS.get(way, os.environ.get("UCX_TLS", ""))
        with waiting_for(f"a NIXL READ, {way}"):
            ended = run_pair("nixl", float, limit_s, {**_TELL, **({"UCX_TLS": tls} if tls else {})})
        version = _UCX_VERSION.search(ended.log)
        yield read_finding(
            Read(
                way,
                tls,
                ended.answer or 0.0,
                wire_in(ended.log),
                ended.failure,
                version[1] if version else "",
            )
        )


def wire_in(log: str) -> str:
    """What UCX reads large pieces over, such as ``cma/memory``; `UCX_PROTO_INFO=y` tells it."""
    wire, is_read = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_read = cells[0].startswith(_READ_TABLE)
        elif is_read and cells and cells[0].endswith("inf"):
            wire = cells[-1]
    return wire


def read_finding(one: Read, ptrace_scope: str | None = None) -> Finding:
    """An error where agents cannot read as it is configured, a warning where they do so over TCP.

    ``ptrace_scope`` is Yama's setting; it is looked up where it is not given.
    """
    told = f"UCX_TLS={one.ucx_tls}" if one.ucx_tls else "UCX_TLS is not set"
    (why, fix), command, severity = WHY_AND_FIX[one.way], "", OK
    found = f"{rate_text(one.bytes_per_s)} over {one.wire or 'what UCX chose'} ({told})"
    if not one.bytes_per_s:
        found = f"fails ({told}): {one.error}"
        severity = ERROR if one.way == CONFIGURED else WARNING
        command = "env | grep ^UCX_" if one.way == CONFIGURED else ""
    elif one.way == CONFIGURED and "tcp/" in one.wire:  # one of several, too
        severity = WARNING
        why = "Agents of this machine whose memory is not mapped read at a fraction of the speed."
        fix, command = _fix_of_tcp(ptrace_scope or text_of(_PTRACE_SCOPE).strip(), one.ucx_tls)
    return Finding(
        f"nixl.read.{one.way}",
        severity,
        found,
        {
            "ucx_tls": one.ucx_tls,
            "bytes_per_s": one.bytes_per_s or None,
            "wire": one.wire,
            "error": one.error,
            "ucx_version": one.ucx_version,
        },
        why=why,
        fix=fix,
        command=command,
    )


def _fix_of_tcp(ptrace_scope: str, ucx_tls: str) -> tuple[str, str]:
    """What lets UCX read the memory of other processes (CMA), and a command."""
    if ucx_tls:
        return "Let UCX use shared memory: UCX_TLS unset, or with sm.", "unset UCX_TLS"
    if ptrace_scope not in ("", "0", "1"):
        fix = f"Set kernel.yama.ptrace_scope, which is {ptrace_scope}, to 1 or 0."
        return fix, "sysctl kernel.yama.ptrace_scope=1"
    return (
        "Let processes read each other's memory: docker --cap-add SYS_PTRACE, or a seccomp profile "
        "with process_vm_readv; agents in different containers need one PID namespace.",
        "",
    )


def check_cuda(limit_s: float) -> Iterator[Finding]:
    """CUDA IPC; one note where there is no GPU: kvbus works from host memory.

    The driver's devices count, visible to torch or not.
    """
    num_devices = sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))
    if num_devices == 0:
        yield Finding("cuda.ipc", NOTE, "CUDA was not checked: there is no NVIDIA GPU here")
        return
    with waiting_for("two processes to share memory of a GPU"):
        ended = run_pair("cuda", GpuMemory, limit_s, {})
    yield ipc_finding(ended.answer, ended.failure, num_devices=num_devices)


def ipc_finding(read: GpuMemory | None, error: str, *, num_devices: int) -> Finding:
    """``error`` says why another process could not open memory that one had, if it had some."""
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text_of("/proc/driver/nvidia/version"))
    torch_version = installed("torch") or "?"
    versions = f"driver {driver[0] if driver else '?'}, torch {torch_version}"
    found = f"CUDA IPC fails, with {num_devices} GPUs of the driver ({versions}): {error}"
    if read:
        names = ", ".join(f"{name} {uuid}" for uuid, name, _ in read.gpus)
        versions += f", CUDA {read.cuda_version}"
        found = f"CUDA IPC works between two processes; {names} ({versions})"
    return Finding(
        "cuda.ipc",
        OK if read else WARNING,
        found,
        {"error": error, "versions": versions, "gpus": read.gpus if read else ()},
        why="KV in GPU memory reaches an agent by CUDA IPC; KV in host memory needs none of it.",
        fix="Install a torch for CUDA that fits the driver, and look at CUDA_VISIBLE_DEVICES. Run "
        "engine and agent in one IPC and PID namespace (docker --ipc=host --pid=host), without "
        "expandable segments in PYTORCH_CUDA_ALLOC_CONF.",
        command="python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'",
    )
