"""Touches memory whose file was truncated, in several threads; then, when told so, others' as well.

cut_memory.py [unwatched]
"""

import os
import sys
import threading
from ctypes import string_at

import numpy as np

from kvbus.memory import BusErrors, SegmentMapping, map_shared

SIZE_BYTES = 1 << 24


fd = os.memfd_create("kvbus-cut")  # which nobody can seal, as those of torch
os.truncate(fd, SIZE_BYTES)
os.pwrite(fd, bytes([1]) * SIZE_BYTES, 0)
mapping = SegmentMapping(os.dup(fd), size_bytes=SIZE_BYTES)
told: list[str] = []
bus_errors = BusErrors()
bus_errors.install()
mapping.survive_cuts(bus_errors, lambda: told.append("cut"))
copies = [np.ones(SIZE_BYTES, np.uint8) for _ in range(4)]
source = mapping.view()
os.ftruncate(fd, 0)
threads = [threading.Thread(target=np.copyto, args=(copy, source)) for copy in copies]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(mapping.sealed, bool(told), sum(int(copy.any()) for copy in copies), flush=True)
if "unwatched" in sys.argv:
    address = map_shared(fd, SIZE_BYTES)
    string_at(address, 4096)
    print("still here", flush=True)
mapping.unmap()
