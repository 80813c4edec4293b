"""Processes that try torch with GPUs: one lists them, two share memory as engine and agent do.

Refuses to use pickle: the handle travels as plain fields.

    cuda_process list      prints the GPUs that torch sees
    cuda_process target    prints what another process needs, and stays until its stdin ends
    cuda_process reader    takes that line; its exit status says whether it could read it
"""

import sys

import msgspec

from kvbus.doctor.check.cuda import Gpu
from kvbus.doctor.probe.cuda import GpuList
from kvbus.doctor.probe.native import die_with_parent
from kvbus.errors import SegmentError
from kvbus.memory.cuda_survey import cuda_version, is_lent, lent_memory, seen_gpus


class LentMemory(msgspec.Struct, frozen=True):
    """The line between the two."""

    device: str
    handle: bytes
    offset_bytes: int
    size_bytes: int


def list_gpus() -> None:
    """Print them."""
    gpus = tuple(Gpu(gpu.uuid, gpu.name, gpu.memory_bytes) for gpu in seen_gpus())
    _print(GpuList(cuda_version(), gpus))


def serve_target() -> None:
    """Have memory, and keep it."""
    memory = lent_memory()
    _print(LentMemory(memory.device, memory.handle, memory.offset_bytes, memory.size_bytes))
    sys.stdin.read()


def read_target() -> None:
    """Open it."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("the other process ended")
    lent = msgspec.json.decode(line, type=LentMemory)
    extent = {"offset_bytes": lent.offset_bytes, "size_bytes": lent.size_bytes}
    if not is_lent(lent.device, lent.handle, **extent):
        sys.exit("it read other bytes than the target has")


def _print(line: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent()
    try:
        {"list": list_gpus, "target": serve_target, "reader": read_target}[sys.argv[1]]()
    except SegmentError as error:
        sys.exit(error.message)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        sys.exit(" ".join(str(error).split()))
