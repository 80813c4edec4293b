"""Reads blocks of another process step by step, and takes an offer by its word.

word_reader.py WORDS_FD BLOCKS_FD TICKET; a line of input is a step: ``copy OFFSET SIZE``, ``take
NAME``, or ``race NAME...``, which takes the words as fast as it can.
"""

import json
import sys

from msgspec.structs import replace

from kvbus.memory.libc import map_shared
from kvbus.memory.mapping import SegmentMapping
from kvbus.memory.run_copy import copy_runs
from kvbus.memory.segment import SharedSegment
from kvbus.planning import Runs
from kvbus.protocol import WORDS_BYTES, Ticket, Word

SIZE_BYTES = 8192

words = SegmentMapping(int(sys.argv[1]), size_bytes=WORDS_BYTES)
ticket = Ticket.from_json(json.loads(sys.argv[3]))


def word(name: str) -> Word:
    return Word(words.swap, replace(ticket, word=int(name)))


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
                is_taken = word(name).take("token")
                print(is_taken, target.view().tobytes().hex(), flush=True)
            case ["race", *names]:
                ready = [word(name) for name in names]
                print("ready", flush=True)
                print(*(int(one.take("token")) for one in ready), flush=True)
words.close()
