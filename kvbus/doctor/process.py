"""A probe's process: it does what may hang or crash, and says why it failed as its last line.

    process nixl|cuda list      prints what there is
    process KIND target         prints where its memory is, and stays until its stdin ends
    process KIND reader         takes that line, and reads there; nixl prints its rate

KIND is ``memory`` (one process reads another's that it did not start), ``nixl`` or ``cuda``.
"""

import contextlib
import ctypes
import os
import sys

import msgspec

from kvbus.errors import KVBusError, TransferFailed

LentMemory = tuple[str, bytes, int, int]
"""Memory of a GPU that another process can open: its device, handle, offset and size."""
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)
_BYTES = b"kvbus reads this"


class NixlList(msgspec.Struct, frozen=True):
    """What NIXL has: memory types by backend, none of one that cannot be loaded."""

    nixl_version: str
    backends: dict[str, tuple[str, ...]]


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as torch sees it."""

    uuid: str
    name: str
    memory_bytes: int


class GpuList(msgspec.Struct, frozen=True):
    """What torch sees."""

    cuda_version: str
    gpus: tuple[Gpu, ...]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


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


def try_memory(role: str) -> None:
    """Read a few bytes of the target."""
    if role == "target":
        # Under Yama any process of our user may read this one from now on, as UCX has it. Without
        # Yama the call fails, and there is nothing to allow.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
        memory = ctypes.create_string_buffer(_BYTES)
        _print([os.getpid(), ctypes.addressof(memory)])
        sys.stdin.read()
        return
    pid, address = msgspec.json.decode(_target_line(), type=tuple[int, int])
    if read_memory(pid, address, len(_BYTES)) != _BYTES:
        sys.exit("it read other bytes than the target has")


def try_nixl(role: str) -> None:
    """List the backends, or measure a bare pair."""
    # Imported only here, as it may crash.
    from kvbus.lab.bare_pair import LONG_BYTES, NUM_PLACES, BareAgent  # noqa: PLC0415
    from kvbus.transport.nixl_agent import NixlAgent, list_backends  # noqa: PLC0415

    if role == "list":
        found = list_backends()
        os.environ["UCX_TLS"] = "none-of-these"  # its complaint lists those that it has
        with contextlib.suppress(TransferFailed):
            NixlAgent(f"kvbus-doctor/{os.getpid()}")
        _print(NixlList(*found))
        return
    agent = BareAgent(f"kvbus-doctor-{role}", NUM_PLACES * LONG_BYTES)
    if role == "target":
        agent.serve()
        return
    agent.connect()
    _print(agent.bytes_per_s())


def try_cuda(role: str) -> None:
    """List the GPUs, or share memory of one as engine and agent do."""
    from kvbus.memory.cuda import survey  # noqa: PLC0415 - torch

    if role == "list":
        gpus = tuple(Gpu(*gpu) for gpu in survey.seen_gpus())
        _print(GpuList(survey.cuda_version(), gpus))
    elif role == "target":
        memory = survey.lent_memory()
        _print((memory.device, memory.handle, memory.offset_bytes, memory.size_bytes))
        sys.stdin.read()
    else:
        device, handle, first, size = msgspec.json.decode(_target_line(), type=LentMemory)
        if not survey.is_lent(device, handle, offset_bytes=first, size_bytes=size):
            sys.exit("it read other bytes than the target has")


def _target_line() -> str:
    return sys.stdin.readline() or sys.exit("the other process ended")


def _print(answer: object) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        {"memory": try_memory, "nixl": try_nixl, "cuda": try_cuda}[sys.argv[1]](sys.argv[2])
    except KVBusError as error:
        sys.exit(error.message)
    except (OSError, RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
        sys.exit(" ".join(str(error).split()))
