"""One of two processes: one lends memory of a GPU as an engine does, one opens it as an agent does.

Refuses to use pickle: the handle travels as plain fields.

    cuda_ipc_process target    prints what another process needs, and stays until its stdin ends
    cuda_ipc_process reader    takes that line; its exit status says whether it could read it
"""

import sys

import msgspec

from kvbus.doctor.probe.native import die_with_parent
from kvbus.errors import SegmentError
from kvbus.memory.cuda_survey import is_lent, lent_memory


class Lent(msgspec.Struct, frozen=True):
    """The line between the two."""

    device: str
    handle: bytes
    offset_bytes: int
    size_bytes: int


def serve_target() -> None:
    """Have memory, and keep it."""
    memory = lent_memory()
    lent = Lent(memory.device, memory.handle, memory.offset_bytes, memory.size_bytes)
    sys.stdout.write(msgspec.json.encode(lent).decode() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def read_target() -> None:
    """Open it."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("the other process ended")
    lent = msgspec.json.decode(line, type=Lent)
    extent = {"offset_bytes": lent.offset_bytes, "size_bytes": lent.size_bytes}
    if not is_lent(lent.device, lent.handle, **extent):
        sys.exit("the bytes were others")


def main() -> None:
    """Be what the first argument says."""
    try:
        if sys.argv[1] == "target":
            serve_target()
        else:
            read_target()
    except SegmentError as error:
        sys.exit(error.message)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    die_with_parent()
    main()
