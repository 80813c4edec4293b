"""Touches memory whose file was truncated, in several threads; then, when told so, others' as well.

cut_memory.py [unwatched]
"""

import os
import sys
import threading
from ctypes import c_byte

import numpy as np

from kvbus.memory import BusErrors, SegmentMapping, libc, share_tensor

SIZE_BYTES = 1 << 24


def shared_file() -> int:
    """A file in shared memory that cannot be sealed, as torch makes them."""
    import torch

    storage = share_tensor(torch.ones(SIZE_BYTES, dtype=torch.uint8))
    fd = os.dup(storage.fd)
    storage.close()
    return fd


fd = shared_file()
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
    address = libc.map_shared(fd, SIZE_BYTES)
    np.frombuffer((c_byte * 4096).from_address(address), np.uint8).copy()
    print("still here", flush=True)
mapping.unmap()
