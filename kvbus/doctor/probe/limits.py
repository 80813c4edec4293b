"""Collects the limits of this process, which those that it starts would have, and RDMA devices.

Refuses to raise any.
"""

import resource
from pathlib import Path

from kvbus.doctor.judge.limits import LimitFacts

_DEVICES = Path("/sys/class/infiniband")
_CAP_IPC_LOCK = 14
_CAP_SYS_PTRACE = 19


def limit_facts() -> LimitFacts:
    """The soft limits, as they are for an agent that is started from here."""
    return LimitFacts(
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
        file_bytes=_soft(resource.RLIMIT_FSIZE),
        may_lock=_has_capability(_CAP_IPC_LOCK),
        rdma_devices=rdma_devices(),
    )


def rdma_devices() -> tuple[str, ...]:
    """The names of the RDMA devices of this machine."""
    try:
        return tuple(sorted(path.name for path in _DEVICES.iterdir()))
    except OSError:
        return ()


def may_trace() -> bool:
    """Whether we may read the memory of any process."""
    return _has_capability(_CAP_SYS_PTRACE)


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False
