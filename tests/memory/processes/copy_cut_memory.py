"""Copies runs out of memory whose file is truncated: by the kernel in a library, or by numpy.

copy_cut_memory.py LIBRARY
"""

import os
import sys
from pathlib import Path

import numpy as np

from kvbus.memory import BusErrors, SegmentMapping
from kvbus.memory.run_copy import copy_by_kernel, copy_by_numpy, load_kernel
from kvbus.planning import Copies

SIZE_BYTES, RUN_BYTES = 1 << 20, 4096


fd = os.memfd_create("kvbus-cut")  # which nobody can seal
os.truncate(fd, SIZE_BYTES)
mapping = SegmentMapping(os.dup(fd), size_bytes=SIZE_BYTES)
told: list[str] = []
bus_errors = BusErrors()
bus_errors.install()
mapping.survive_cuts(bus_errors, lambda: told.append("cut"))
source, target = mapping.view(), np.ones(SIZE_BYTES, np.uint8)
source[:] = 1
at = np.array([[source.ctypes.data], [target.ctypes.data]])
steps = np.stack([np.arange(0, SIZE_BYTES, RUN_BYTES)] * 2)
runs = Copies(at, steps[:, ::-1], np.array([[0, 2048], [0, 2048]]), 2048)
os.truncate(fd, 0)
kernel = load_kernel(Path(sys.argv[1]))
if kernel is None:
    copy_by_numpy(runs)
else:
    copy_by_kernel(kernel, runs)
print(kernel is not None, bool(told), int(target.sum()))
mapping.unmap()
