"""Checks of NIXL: speed and transport of READs between two processes."""

import os
from collections.abc import Iterator
from functools import partial

import anyio

from kvbus.agent.probe import MeasuredRead, measure_read
from kvbus.data.messages import HOST
from kvbus.doctor.finding import ERROR, OK, WARNING, Finding
from kvbus.doctor.host import rdma_devices, text_of
from kvbus.output import waiting_for
from kvbus.text import rate_text

CONFIGURED, TCP, RDMA = "configured", "tcp", "rdma"
UCX_TLS = {TCP: "tcp", RDMA: "ib"}
WHY_AND_FIX = {
    CONFIGURED: (
        "Agents that are started from here move all bytes with NIXL and UCX, and cannot read.",
        "Install NIXL as required, see versions.nixl; of several installations of UCX, "
        "LD_LIBRARY_PATH may have chosen another. Check the UCX_ settings of the environment; "
        "without any, UCX chooses. "
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
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def check_nixl(limit_s: float) -> Iterator[Finding]:
    for way in WHY_AND_FIX:
        if way == RDMA and not rdma_devices():
            continue
        tls = UCX_TLS.get(way, os.environ.get("UCX_TLS", ""))
        with waiting_for(f"a NIXL READ, {way}"):
            read = anyio.run(partial(measure_read, HOST, limit_s=limit_s, tls=tls))
        yield read_finding(way, tls, read)


def read_finding(
    way: str, ucx_tls: str, read: MeasuredRead, ptrace_scope: str | None = None
) -> Finding:
    """Return an error if the configured read fails, a warning if agents would read over TCP."""
    setting = f"UCX_TLS={ucx_tls}" if ucx_tls else "UCX_TLS is not set"
    (why, fix), command, severity = WHY_AND_FIX[way], "", OK
    found = f"{rate_text(read.bytes_per_s)} over {read.wire or 'what UCX chose'} ({setting})"
    if not read.bytes_per_s:
        found = f"fails ({setting}): {read.error}"
        severity = ERROR if way == CONFIGURED else WARNING
        command = "env | grep ^UCX_" if way == CONFIGURED else ""
    elif way == CONFIGURED and "tcp/" in read.wire:  # also as one of several
        severity = WARNING
        why = "Agents of this machine whose memory is not mapped read at a fraction of the speed."
        fix, command = _fix_of_tcp(ptrace_scope or text_of(_PTRACE_SCOPE).strip(), ucx_tls)
    return Finding(
        f"nixl.read.{way}",
        severity,
        found,
        {
            "ucx_tls": ucx_tls,
            "bytes_per_s": read.bytes_per_s or None,
            "wire": read.wire,
            "error": read.error,
            "ucx_version": read.ucx_version,
        },
        why=why,
        fix=fix,
        command=command,
    )


def _fix_of_tcp(ptrace_scope: str, ucx_tls: str) -> tuple[str, str]:
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
