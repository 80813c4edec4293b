"""Copies from a lent file that cannot be sealed, and that its owner cuts meanwhile."""

import os
from pathlib import Path

import numpy as np

from kvbus.memory import BusErrors, LentMapping

SIZE_BYTES = 1 << 24

fd = os.memfd_create("unsealable")
os.ftruncate(fd, SIZE_BYTES)
os.posix_fallocate(fd, 0, SIZE_BYTES)
os.pwrite(fd, b"\x01" * SIZE_BYTES, 0)
mapping = LentMapping(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), size_bytes=SIZE_BYTES)
view, told = mapping.view(), list[str]()


def on_cut() -> None:
    is_file = "memfd:unsealable" in Path("/proc/self/maps").read_text()
    told.append("before" if is_file else "after")


bus_errors = BusErrors()
bus_errors.install()
mapping.survive_cuts(bus_errors, on_cut)
os.ftruncate(fd, 0)
copy = np.array(view)
print(mapping.sealed, *dict.fromkeys(told), "bytes" if copy.any() else "zeros")
mapping.close()
