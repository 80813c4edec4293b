"""Tries whether one process can read the memory of another one that it did not start.

Refuses to conclude from settings. What NIXL makes of it is measured elsewhere.

    read_memory target    prints its pid and an address, and stays until its stdin ends
    read_memory reader    takes that line; its exit status says whether it could read there
"""

import ctypes
import os
import sys
from pathlib import Path

from kvbus.doctor.check.host import ProcessFacts
from kvbus.doctor.probe.children import Budget, run_pair
from kvbus.doctor.probe.native import CAP_SYS_PTRACE, die_with_parent, has_capability

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_BYTES = b"kvbus reads this"


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def process_facts(budget: Budget) -> ProcessFacts:
    """Two processes, and the settings that explain what came of it."""
    return ProcessFacts(
        error=run_pair("kvbus.doctor.probe.read_memory", env={}, budget=budget).failure,
        ptrace_scope=int(_PTRACE_SCOPE.read_bytes()) if _PTRACE_SCOPE.exists() else None,
        may_trace=has_capability(CAP_SYS_PTRACE),
    )


def read_memory(pid: int, address: int, num_bytes: int) -> bytes:
    """Bytes of another process. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    buffer, one = ctypes.create_string_buffer(num_bytes), ctypes.c_ulong(1)
    here = _Iovec(ctypes.addressof(buffer), num_bytes)
    there = _Iovec(address, num_bytes)
    num_read: int = libc.process_vm_readv(pid, ctypes.byref(here), one, ctypes.byref(there), one, 0)
    if num_read < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw[:num_read]


def _serve_target() -> None:
    # Under Yama any process of our user may read this one from now on, as UCX has it. Without Yama
    # the call fails, and there is nothing to allow.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
    memory = ctypes.create_string_buffer(_BYTES)
    sys.stdout.write(f"{os.getpid()} {ctypes.addressof(memory)}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _read_target() -> None:
    pid, address = (int(number) for number in sys.stdin.readline().split())
    try:
        found = read_memory(pid, address, len(_BYTES))
    except OSError as error:
        sys.exit(str(error))
    if found != _BYTES:
        sys.exit("it read other bytes than the target has")


if __name__ == "__main__":
    die_with_parent()
    _serve_target() if sys.argv[1] == "target" else _read_target()
