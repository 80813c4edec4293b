"""A bare NIXL process: ``python -m kvbus.lab.bare_pair SIZE ROWS.npz``.

It lends memory and drives NIXL, or posts all descriptors together and spins until they are done.
"""

import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvbus.data import nixl_agent
from kvbus.data.messages import UCX_ONLY, Backends, MemoryKind
from kvbus.data.metadata import read_metadata
from kvbus.data.nixl import Registration
from kvbus.data.scheduler import PostLimits
from kvbus.data.slicing import Rows
from kvbus.errors import TransferFailed
from kvbus.lab.process import run_program, serve
from kvbus.memory.segment import huge_bytes

WORD_BYTES = 8
LONG_BYTES = 8 << 20
"""One slice, as agents post it."""
NUM_PLACES = 4
"""In total, long descriptors exceed most CPU caches, as KV does."""
LEAST_READS, MOST_READS, MEASURE_S = 8, 64, 0.4


class MemoryLocation(msgspec.Struct, frozen=True):
    address: int
    metadata: bytes


class BareAgent:
    def __init__(
        self,
        size_bytes: int = NUM_PLACES * LONG_BYTES,
        rows: Mapping[str, Rows] | None = None,
        backends: Backends = UCX_ONLY,
    ) -> None:
        new_agent = nixl_agent.load(backends)
        self._backend = next(iter(backends))
        self._words = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint64)
        self._words[:] = 0  # touches all pages
        self._address = self._words.ctypes.data
        self._rows = rows or {}
        self._agent = new_agent(f"bare-{os.getpid()}")
        self._registration = Registration(self._address, size_bytes, 0, "DRAM")
        self._agent.register(self._registration)
        self._peer, self._remote_address = "", 0
        self._drives = threading.Event()

    def lend(self) -> MemoryLocation:
        self._words[:] = np.arange(len(self._words))
        self.drive()
        threading.Thread(target=self._progress, daemon=True).start()
        metadata = self._agent.metadata([self._registration], self._backend)
        return MemoryLocation(self._address, metadata)

    def drive(self) -> None:
        self._drives.set()

    def rest(self) -> None:
        self._drives.clear()

    def _progress(self) -> None:
        while self._drives.wait():
            self._agent.progress()
            time.sleep(PostLimits().poll_s)

    def huge_share(self) -> float:
        return huge_bytes(self._address) / self._words.nbytes

    def connect(self, **lent: Any) -> None:
        location = msgspec.convert(lent, MemoryLocation)
        peer = read_metadata(location.metadata)
        self._agent.add_peer(peer)
        self._peer, self._remote_address = peer.name, location.address

    def read(self) -> float:
        return self._read_s(self._rows["local"], self._rows["remote"])

    def verify(self) -> float:
        return self._verify(self._rows["local"], self._rows["remote"])

    def measure(self, **lent: Any) -> float:
        self.connect(**lent)
        descriptors = [_long_row(number) for number in range(NUM_PLACES)]
        for rows in descriptors:  # the first READs connect, and fault in the pages
            self._verify(rows, rows)
        times_s: list[float] = []
        began = time.perf_counter()
        while len(times_s) < LEAST_READS or (
            len(times_s) < MOST_READS and time.perf_counter() - began < MEASURE_S
        ):
            rows = descriptors[len(times_s) % NUM_PLACES]
            times_s.append(self._read_s(rows, rows))
        return LONG_BYTES / statistics.median(times_s)

    def _read_s(self, local: Rows, remote: Rows) -> float:
        local_rows = _at(self._address, local)
        remote_rows = _at(self._remote_address, remote)
        kinds: tuple[MemoryKind, MemoryKind] = ("DRAM", "DRAM")
        began = time.perf_counter()
        handle = self._agent.prepare(self._peer, local_rows, remote_rows, kinds)
        done = self._agent.post(handle, self._peer)
        while not done:
            done = self._agent.is_done(handle, self._peer)
        took_s = time.perf_counter() - began
        self._agent.release(handle)
        return took_s

    def _verify(self, local: Rows, remote: Rows) -> float:
        self._words[:] = np.iinfo(np.uint64).max
        took_s = self._read_s(local, remote)
        starts = (local[:, 0] // WORD_BYTES, remote[:, 0] // WORD_BYTES)
        for to, start, num in zip(*starts, local[:, 1] // WORD_BYTES, strict=True):
            if not (self._words[to : to + num] == np.arange(start, start + num)).all():
                raise TransferFailed("the read brought wrong bytes")
        return took_s


def _long_row(number: int) -> Rows:
    return np.array([[number * LONG_BYTES, LONG_BYTES, 0]], np.uint64)


def _at(address: int, rows: Rows) -> Rows:
    moved = rows.copy()
    moved[:, 0] += np.uint64(address)
    return moved


if __name__ == "__main__":
    with np.load(sys.argv[2]) as given:
        bare = BareAgent(int(sys.argv[1]), dict(given))
    run_program(partial(serve, bare))
    os._exit(0)  # remaining NIXL threads may hang in its destructors
