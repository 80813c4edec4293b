"""A process with almost as many mappings as the machine allows, that is passed one more segment."""

import mmap
import os
from pathlib import Path

from kvbus.errors import SegmentError
from kvbus.memory.libc import map_shared
from tests.support.data_process import DataInThread, FlatMemory

PAGE_BYTES = mmap.PAGESIZE
most = int(Path("/proc/sys/vm/max_map_count").read_text())
flat = FlatMemory.of(1, PAGE_BYTES)
data = DataInThread()
fd = os.memfd_create("pages")
os.ftruncate(fd, 2 * PAGE_BYTES)
for _ in range(most * 3 // 4):
    map_shared(fd, PAGE_BYTES)  # none follows the one before in the file: they stay apart
try:
    data.add(1, flat)
except SegmentError as error:
    print(error.code.value, "vm.max_map_count" in error.message)
data.end()
flat.segment.close()
