"""Bare NIXL: a process that holds memory, or reads another one's, with nothing else of kvbus.

    python -m kvbus.lab.bare_pair SIZE ROWS.npz usual|huge

The tool asks one to `lend`, and to drive NIXL while the other one reads. The reader posts all
descriptors at once and spins until they are done.
"""

import mmap
import os
import statistics
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvbus.errors import TransferFailed
from kvbus.lab.process import Question, run_program, serve
from kvbus.memory.segment import huge_bytes
from kvbus.transport.nixl_agent import NixlAgent
from kvbus.transport.slicing import Rows
from kvbus.transport.types import MemoryKind, Registration, TransportLimits

WORD_BYTES = 8
LONG_BYTES = 8 << 20
"""One slice of bytes, as agents post it."""
NUM_PLACES = 4
"""So many long descriptors in turn: together they are more than most caches hold, as KV is."""
LEAST_READS, MOST_READS, MEASURE_S = 8, 64, 0.4


class MemoryLocation(msgspec.Struct, frozen=True):
    """What a reader needs of its target."""

    address: int
    metadata: bytes


class BareAgent:
    """One NIXL agent with memory of its own: who calls it drives it.

    With ``huge_pages`` its memory is private, for which most kernels give them. One that lends its
    memory drives NIXL by itself while ``drives`` is set.
    """

    def __init__(self, name: str, size_bytes: int, *, huge_pages: bool = False) -> None:
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE if huge_pages else mmap.MAP_SHARED)
        if huge_pages:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(memory, np.uint64)
        self._words[:] = 0  # its pages are there from now on
        self._address = self._words.ctypes.data
        self._agent = NixlAgent(f"{name}/{os.getpid()}")
        self._agent.register(Registration(1, self._address, size_bytes, 0, "DRAM"))
        self._peer, self._there = "", 0
        self.drives = threading.Event()

    def lend(self) -> MemoryLocation:
        """Fill the memory, say where it is, and let it be read."""
        self._words[:] = np.arange(len(self._words))
        self.drives.set()
        threading.Thread(target=self._drive, daemon=True).start()
        return MemoryLocation(self._address, self._agent.metadata(None))

    def _drive(self) -> None:
        """Drive NIXL as often as an agent does, without an end."""
        while self.drives.wait():
            self._agent.progress()
            time.sleep(TransportLimits().poll_s)

    def huge_share(self) -> float:
        """The part of its memory that lies in huge pages."""
        return huge_bytes(self._address) / self._words.nbytes

    def connect(self, location: MemoryLocation) -> None:
        """Read from there from now on."""
        self._peer, self._there = self._agent.add_peer(location.metadata), location.address

    def read_s(self, local: Rows, remote: Rows) -> float:
        """Seconds of one READ of rows whose addresses are offsets."""
        here, there = moved_rows(local, self._address), moved_rows(remote, self._there)
        kinds: tuple[MemoryKind, MemoryKind] = ("DRAM", "DRAM")
        began = time.perf_counter()
        handle = self._agent.prepare(self._peer, here, there, kinds)
        done = self._agent.post(handle, self._peer)
        while not done:
            done = self._agent.is_done(handle, self._peer)
        took_s = time.perf_counter() - began
        self._agent.release(handle)
        return took_s

    def verify(self, local: Rows, remote: Rows) -> float:
        """`read_s` into wiped memory; raises `TransferFailed` for wrong bytes."""
        self._words[:] = np.iinfo(np.uint64).max
        took_s = self.read_s(local, remote)
        starts = (local[:, 0] // WORD_BYTES, remote[:, 0] // WORD_BYTES)
        for to, start, num in zip(*starts, local[:, 1] // WORD_BYTES, strict=True):
            if not (self._words[to : to + num] == np.arange(start, start + num)).all():
                raise TransferFailed("the read brought wrong bytes")
        return took_s

    def bytes_per_s(self) -> float:
        """The median of long READs, measured for a while."""
        places = [spaced_rows(1, LONG_BYTES, first=n * LONG_BYTES) for n in range(NUM_PLACES)]
        for rows in places:  # connects, and takes the faults of pages
            self.verify(rows, rows)
        times_s: list[float] = []
        began = time.perf_counter()
        while len(times_s) < LEAST_READS or (
            len(times_s) < MOST_READS and time.perf_counter() - began < MEASURE_S
        ):
            rows = places[len(times_s) % NUM_PLACES]
            times_s.append(self.read_s(rows, rows))
        return LONG_BYTES / statistics.median(times_s)


def spaced_rows(num: int, size_bytes: int, stride_bytes: int = 0, *, first: int = 0) -> Rows:
    """Rows of one size whose addresses are offsets, ``stride_bytes`` apart."""
    rows = np.zeros((num, 3), np.uint64)
    rows[:, 0] = first + np.arange(num) * stride_bytes
    rows[:, 1] = size_bytes
    return rows


def moved_rows(rows: Rows, address: int, device: int = 0) -> Rows:
    """The same rows from ``address`` on."""
    moved = rows.copy()
    moved[:, 0] += np.uint64(address)
    moved[:, 2] = device
    return moved


async def be(size_bytes: int, rows_path: Path, pages: str) -> None:
    """One of a pair, as the line says."""
    agent = BareAgent("bare", size_bytes, huge_pages=pages == "huge")
    with np.load(rows_path) as rows:
        local, remote = rows["local"], rows["remote"]

    async def answer(question: Question) -> object:
        match question.do:
            case "lend":
                return agent.lend()
            case "drive":
                agent.drives.set()
            case "rest":
                agent.drives.clear()
            case "connect":
                agent.connect(msgspec.convert(question.given, MemoryLocation))
            case "huge_share":
                return agent.huge_share()
            case "verify":
                return agent.verify(local, remote)
            case "read":
                return agent.read_s(local, remote)
        return None

    await serve(answer)


if __name__ == "__main__":
    run_program(partial(be, int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
    os._exit(0)  # what is left of NIXL may hang in its destructors
