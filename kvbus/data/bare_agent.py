"""A bare NIXL process: ``python -m kvbus.data.bare_agent BACKENDS GPU|host target|reader``.

It lends memory and drives NIXL, or posts all descriptors together and spins until they are done.
Stdin of the two is a socket between them; the reader prints its result.
"""

import mmap
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbus.data import nixl_agent
from kvbus.data.messages import HOST, UCX_ONLY, Backends, MemoryKind
from kvbus.data.metadata import read_metadata
from kvbus.data.nixl import Registration
from kvbus.data.scheduler import PostLimits
from kvbus.data.slicing import Rows
from kvbus.errors import KVBusError, PeerLost, TransferFailed
from kvbus.memory.cuda import VramMemory, gpu_ordinal, read_bytes, write_bytes
from kvbus.memory.segment import huge_bytes

WORD_BYTES = 8
LONG_BYTES = 8 << 20
"""One slice, as agents post it."""
NUM_PLACES = 4
"""In total, long descriptors exceed most CPU caches, as KV does."""
LEAST_READS, MOST_READS, MEASURE_S = 8, 64, 0.4


Words = npt.NDArray[np.uint64]


class MemoryLocation(msgspec.Struct, frozen=True):
    address: int
    metadata: bytes


class _HostWords:
    kind: MemoryKind = "DRAM"
    ordinal = 0

    def __init__(self, size_bytes: int) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint64)
        self._words[:] = 0  # touches all pages
        self.address = self._words.ctypes.data

    def get(self) -> Words:
        return self._words

    def set(self, words: Words) -> None:
        self._words[:] = words


class _GpuWords:
    kind: MemoryKind = "VRAM"

    def __init__(self, size_bytes: int, gpu: str) -> None:
        self.ordinal, self._size_bytes = gpu_ordinal(gpu), size_bytes
        self._memory = VramMemory(size_bytes, self.ordinal)
        self.address = self._memory.address

    def get(self) -> Words:
        content = read_bytes(self.ordinal, self.address, self._size_bytes)
        return np.frombuffer(content, np.uint64)

    def set(self, words: Words) -> None:
        write_bytes(self.ordinal, self.address, words.tobytes())


class BareAgent:
    def __init__(
        self,
        size_bytes: int = NUM_PLACES * LONG_BYTES,
        rows: Mapping[str, Rows] | None = None,
        *,
        device: str = HOST,
        backends: Backends = UCX_ONLY,
    ) -> None:
        new_agent = nixl_agent.load(backends)
        self._backend = next(iter(backends))
        self._size_bytes, self._rows = size_bytes, rows or {}
        self._memory = _HostWords(size_bytes) if device == HOST else _GpuWords(size_bytes, device)
        self._address, kind = self._memory.address, self._memory.kind
        self._agent = new_agent(f"bare-{os.getpid()}")
        self._registration = Registration(self._address, size_bytes, self._memory.ordinal, kind)
        self._agent.register(self._registration)
        self._peer, self._remote_address = "", 0
        self._drives = threading.Event()

    def lend(self) -> MemoryLocation:
        self._memory.set(np.arange(self._size_bytes // WORD_BYTES, dtype=np.uint64))
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
        return huge_bytes(self._address) / self._size_bytes

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
        local_rows = self._at(self._address, local)
        remote_rows = self._at(self._remote_address, remote)
        kinds = (self._memory.kind, self._memory.kind)
        began = time.perf_counter()
        handle = self._agent.prepare(self._peer, local_rows, remote_rows, kinds)
        done = self._agent.post(handle, self._peer)
        while not done:
            done = self._agent.is_done(handle, self._peer)
        took_s = time.perf_counter() - began
        self._agent.release(handle)
        return took_s

    def _verify(self, local: Rows, remote: Rows) -> float:
        poison = np.iinfo(np.uint64).max
        self._memory.set(np.full(self._size_bytes // WORD_BYTES, poison, np.uint64))
        took_s, words = self._read_s(local, remote), self._memory.get()
        starts = (local[:, 0] // WORD_BYTES, remote[:, 0] // WORD_BYTES)
        for to, start, num in zip(*starts, local[:, 1] // WORD_BYTES, strict=True):
            if not (words[to : to + num] == np.arange(start, start + num)).all():
                raise TransferFailed("the read brought wrong bytes")
        return took_s

    def _at(self, address: int, rows: Rows) -> Rows:
        """Both sides see the same GPUs, by the same numbers."""
        moved = rows.copy()
        moved[:, 0] += np.uint64(address)
        moved[:, 2] = self._memory.ordinal
        return moved


def _long_row(number: int) -> Rows:
    return np.array([[number * LONG_BYTES, LONG_BYTES, 0]], np.uint64)


def main() -> None:
    _, backends, device, role = sys.argv
    agent = BareAgent(device=device, backends=msgspec.json.decode(backends, type=Backends))
    with socket.socket(fileno=0) as sock, sock.makefile("rwb") as stream:
        if role == "target":
            stream.write(msgspec.json.encode(agent.lend()) + b"\n")
            stream.flush()
            stream.read()
        elif line := stream.readline():
            bytes_per_s = agent.measure(**msgspec.json.decode(line))
            sys.stdout.write(f"{bytes_per_s}\n")
            sys.stdout.flush()
        else:
            raise PeerLost("the target has ended")


if __name__ == "__main__":
    try:
        main()
    except KVBusError as error:
        sys.stderr.write(f"error: {error.code}: {error.message}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # remaining NIXL threads may hang in its destructors
