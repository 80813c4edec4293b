"""The calls of the C library that the probes need and Python does not have.

Refuses to keep state: each function is one call, and a failure is an ``OSError``.
"""

import ctypes
import os
import signal
import sys

PARENT_KEY = "KVBUS_DOCTOR_PID"
"""Who started a probe process, in its environment."""
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class _Piece(ctypes.Structure):
    """A ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends.

    A parent that ended before, while this process imported, is gone for the kernel: we end.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.environ.get(PARENT_KEY) != str(os.getppid()):
        sys.exit("who started this process has ended")


def let_others_read() -> None:
    """Let any process of our user read this one's memory under Yama, as UCX does."""
    _libc.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # fails without Yama: nothing to allow


def read_memory(pid: int, address: int, num_bytes: int) -> bytes:
    """Bytes of another process. Raises ``OSError``."""
    buffer = ctypes.create_string_buffer(num_bytes)
    here = _Piece(ctypes.addressof(buffer), num_bytes)
    there = _Piece(address, num_bytes)
    num_read: int = _libc.process_vm_readv(
        pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), 0
    )
    if num_read < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw[:num_read]
