"""Reads blocks of another process step by step, and takes an offer by its cell.

cell_reader.py WORDS_FD BLOCKS_FD TICKET; a line of input is a step: ``copy OFFSET SIZE``, ``take
NAME``, or ``race NAME...``, which takes the cells as fast as it can.
"""

import json
import sys

from msgspec.structs import replace

from kvbus.memory.libc import map_shared
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.run_copy import copy_runs
from kvbus.memory.segment import SharedSegment
from kvbus.planning import Runs
from kvbus.protocol import CELLS_BYTES, CommitCell, Ticket

SIZE_BYTES = 8192

cells = SegmentMapping(int(sys.argv[1]), size_bytes=CELLS_BYTES)
ticket = Ticket.from_json(json.loads(sys.argv[3]))


def cell(name: str) -> CommitCell:
    return CommitCell(cells.swap, replace(ticket, cell=int(name)))


source = map_shared(int(sys.argv[2]), SIZE_BYTES, writable=False)
with SharedSegment(SIZE_BYTES) as target:
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["copy", offset, size]:
                at = int(offset)
                copy_runs(Runs(((target.address + at, source + at, int(size)),)))
                print("done", flush=True)
            case ["take", name]:
                is_committed = cell(name).commit("token")
                print(is_committed, target.view().tobytes().hex(), flush=True)
            case ["race", *names]:
                ready = [cell(name) for name in names]
                print("ready", flush=True)
                print(*(int(one.commit("token")) for one in ready), flush=True)
cells.close()
