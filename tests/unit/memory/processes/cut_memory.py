"""Reads memory whose file was cut, in several threads, and prints its findings.

cut_memory.py mapped | copied LIBRARY | lent | unwatched
"""

import os
import sys
import threading
from ctypes import string_at
from pathlib import Path

import numpy as np

from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.libc import map_shared
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.run_copy import copy_by_kernel, copy_by_numpy, load_kernel
from kvbus.planning import Lattice

SIZE_BYTES, RUN_BYTES = 1 << 24, 4096
kind, *library = sys.argv[1:]
fd = os.memfd_create("kvbus-cut")  # which nobody can seal, as those of torch
os.truncate(fd, SIZE_BYTES)
os.pwrite(fd, b"\x01" * SIZE_BYTES, 0)
is_lent = kind == "lent"
passed = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY if is_lent else os.O_RDWR)
mapping = SegmentMapping(passed, size_bytes=SIZE_BYTES, borrowed=is_lent)
told: set[str] = set()


def on_cut() -> None:
    """Whoever reads is told before the file's pages are replaced."""
    told.add("before" if "memfd:kvbus-cut" in Path("/proc/self/maps").read_text() else "after")


def copy(source: np.ndarray, target: np.ndarray) -> None:
    if kind != "copied":
        np.copyto(target, source)
        return
    at = np.array([[source.ctypes.data], [target.ctypes.data]])
    steps = np.stack([np.arange(0, SIZE_BYTES, RUN_BYTES)] * 2)
    runs = Lattice(at, steps[:, ::-1], np.array([[0, 2048], [0, 2048]]), 2048)
    kernel = load_kernel(Path(library[0]))
    if kernel is None:
        copy_by_numpy(runs)
    else:
        copy_by_kernel(kernel, runs)


bus_errors = BusErrors()
bus_errors.install()
mapping.survive_truncation(bus_errors, on_cut)
copies = [np.ones(SIZE_BYTES, np.uint8) for _ in range(4)]
view = mapping.view()
os.ftruncate(fd, 0)
threads = [threading.Thread(target=copy, args=(view, target)) for target in copies]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(mapping.sealed, "before" in told, sum(int(one.any()) for one in copies), flush=True)
if kind == "unwatched":
    string_at(map_shared(fd, SIZE_BYTES), 4096)
    print("still here", flush=True)
mapping.close()
