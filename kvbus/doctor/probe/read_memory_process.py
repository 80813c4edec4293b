"""One of two processes: a target with a few bytes, and a reader that takes them out of its memory.

Refuses more than that: what NIXL makes of it is measured elsewhere.

    read_memory_process target    prints its pid and an address, and stays until its stdin ends
    read_memory_process reader    takes that line; its exit status says whether it could
"""

import ctypes
import os
import sys

from kvbus.doctor.probe.native import die_with_parent, let_others_read, read_memory

_BYTES = b"kvbus reads this"


def serve_target() -> None:
    """Have memory to read."""
    let_others_read()
    memory = ctypes.create_string_buffer(_BYTES)
    sys.stdout.write(f"{os.getpid()} {ctypes.addressof(memory)}\n")
    sys.stdout.flush()
    sys.stdin.read()


def read_target() -> None:
    """Read it."""
    pid, address = (int(number) for number in sys.stdin.readline().split())
    try:
        found = read_memory(pid, address, len(_BYTES))
    except OSError as error:
        sys.exit(str(error))
    if found != _BYTES:
        sys.exit("the bytes were others")


if __name__ == "__main__":
    die_with_parent()
    if sys.argv[1] == "target":
        serve_target()
    else:
        read_target()
