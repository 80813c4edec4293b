"""One of two processes: a target with a tensor on the GPU, and a reader that opens its memory.

Refuses to use pickle: the handle travels as plain numbers, flags and bytes.

    cuda_ipc_process target    prints what another process needs, and stays until its stdin ends
    cuda_ipc_process reader    takes that line; its exit status says whether it could read it
"""

import sys
from typing import Any

import msgspec

from kvbus.doctor.probe.native import die_with_parent
from kvbus.memory.cuda_survey import exported, is_marked, marked_tensor


def encoded(fields: list[Any]) -> str:
    """One line of JSON: bytes are marked as such."""
    marked = [["hex", one.hex()] if isinstance(one, bytes) else ["plain", one] for one in fields]
    return msgspec.json.encode(marked).decode() + "\n"


def decoded(line: str) -> list[Any]:
    """What `encoded` was given."""
    marked = msgspec.json.decode(line, type=list[tuple[str, Any]])
    return [bytes.fromhex(one) if kind == "hex" else one for kind, one in marked]


def serve_target() -> None:
    """Have a tensor, and keep it."""
    tensor = marked_tensor()
    sys.stdout.write(encoded(exported(tensor)))
    sys.stdout.flush()
    sys.stdin.read()


def read_target() -> None:
    """Open it."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("the other process ended")
    if not is_marked(decoded(line)):
        sys.exit("the bytes were others")


def main() -> None:
    """Be what the first argument says."""
    try:
        if sys.argv[1] == "target":
            serve_target()
        else:
            read_target()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    die_with_parent()
    main()
