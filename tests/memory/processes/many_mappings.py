"""A process with almost as many mappings as the machine allows, that is passed one more segment."""

import mmap
import os
from pathlib import Path

from kvbus.errors import SegmentError
from kvbus.memory.libc import map_shared
from kvbus.memory.mapping import SegmentMapping

PAGE_BYTES = mmap.PAGESIZE
most = int(Path("/proc/sys/vm/max_map_count").read_text())
fd = os.memfd_create("pages")
os.ftruncate(fd, 2 * PAGE_BYTES)
for _ in range(most * 3 // 4):
    map_shared(fd, PAGE_BYTES)  # none follows the one before in the file: they stay apart
try:
    SegmentMapping(os.dup(fd), size_bytes=2 * PAGE_BYTES)
except SegmentError as error:
    print(error.code.value, "vm.max_map_count" in error.message)
