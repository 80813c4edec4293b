"""What Linux says and does for processes: capabilities, and an end with the parent."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PARENT_KEY = "KVBUS_DOCTOR_PID"
"""Who started a probe process, in its environment."""
CAP_IPC_LOCK, CAP_SYS_PTRACE = 14, 19
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends.

    A parent that ended before, while this process imported, is gone for the kernel: we end.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.environ.get(PARENT_KEY) != str(os.getppid()):
        sys.exit("who started this process has ended")


def has_capability(number: int) -> bool:
    """Whether this process has a capability of Linux."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False
