"""Copies on one GPU, between its memory, that of its peers, and pinned host memory."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbus.errors import KVBusError, SegmentError, TransferFailed
from kvbus.memory.cuda import driver
from kvbus.memory.cuda.slots import PinnedMemory, VramMemory
from kvbus.planning import Lattice, Runs

KERNELS = Path(__file__).with_name("copy_lattice.ptx")
WORD_BYTES = (16, 8, 4, 2, 1)
LONG_BYTES = 256 << 10
"""A copy engine moves longer runs; the kernel moves shorter ones."""
OFFSETS_BYTES = 1 << 20
MAX_OFFSETS = OFFSETS_BYTES // 16  # of two sides
THREADS, BLOCKS_A_PROCESSOR = 256, 8
MAX_WORDS = 1 << 30
"""The kernel counts words in 32 bits."""

OnLost = Callable[[Exception], object]


@cache
def _kernels(ordinal: int) -> dict[int, int]:
    """Load the kernels into the GPU's context; its driver compiles them for the GPU."""
    with driver.on_gpu(ordinal):
        module = _load(ordinal)
        return {size: driver.find_kernel(module, f"kvbus_copy_{size}") for size in WORD_BYTES}


def _load(ordinal: int) -> int:
    try:
        return driver.load_module(KERNELS.read_bytes() + b"\0")
    except SegmentError as error:
        raise SegmentError(
            f"the driver, for CUDA {driver.driver_version()}, refuses the copy kernels for "
            f"{driver.gpu_name(ordinal)}: {error.message}. They need a driver for CUDA 12.0 "
            "(525.60) or later, and a V100 or a later GPU"
        ) from error


class GpuCopier:
    """Thread-safe; each thread has a stream. Calls block until the bytes are there.

    Raises `TransferFailed`. ``on_lost`` is called when CUDA fails for good in this process.
    """

    def __init__(self, ordinal: int, on_lost: OnLost) -> None:
        self.ordinal, self._on_lost = ordinal, on_lost
        self._threads = threading.local()
        self._kernels = _kernels(ordinal)
        with driver.on_gpu(ordinal):  # a full GPU is an error of the first engine, not of a copy
            self._spare = [_Lane(ordinal)]
        self._max_blocks = BLOCKS_A_PROCESSOR * driver.attribute(ordinal, driver.NUM_PROCESSORS)

    def copy(self, runs: Runs) -> None:
        """Sources and targets must not overlap."""

        def queue(lane: _Lane) -> None:
            for one in runs.all_lattices():
                if one.run_bytes >= LONG_BYTES:
                    for source, target in one.addresses().T.tolist():
                        driver.copy_async(target, source, one.run_bytes, lane.stream)
                else:
                    self._launch(lane, one)

        self._run(queue)

    def zero(self, runs: Runs) -> None:
        """Zero the targets."""

        def queue(lane: _Lane) -> None:
            for target, _, num_bytes in runs:
                driver.zero_async(target, num_bytes, lane.stream)

        self._run(queue)

    def room(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned memory of this thread, whose content the next call may replace."""
        with driver.on_gpu(self.ordinal):
            return self._lane().room(num_bytes)

    def _run(self, queue: "Callable[[_Lane], None]") -> None:
        try:
            with driver.on_gpu(self.ordinal):
                lane = self._lane()
                try:
                    queue(lane)
                finally:
                    driver.synchronize(lane.stream)
                    lane.reset()
        except SegmentError as error:
            raise self._failed(error) from error

    def _failed(self, error: SegmentError) -> KVBusError:
        if not is_context_lost(self.ordinal):
            return TransferFailed(f"a copy on GPU {self.ordinal} failed: {error.message}")
        self._on_lost(error)
        return TransferFailed(f"CUDA is lost to the data process: {error.message}")

    def _lane(self) -> "_Lane":
        lane: _Lane | None = getattr(self._threads, "lane", None)
        if lane is None:
            try:
                lane = self._spare.pop()
            except IndexError:
                lane = _Lane(self.ordinal)
            self._threads.lane = lane
        return lane

    def _launch(self, lane: "_Lane", one: Lattice) -> None:
        word_bytes = _word_bytes(one)
        run_words = one.run_bytes // word_bytes
        for part in _cut(one, MAX_WORDS // run_words):
            num_words = part.num_runs * run_words
            driver.launch(
                self._kernels[word_bytes],
                min(self._max_blocks, -(-num_words // THREADS)),
                THREADS,
                lane.stream,
                ctypes.c_uint64(lane.upload(part)),
                *map(ctypes.c_uint, (*part.shape, run_words, num_words)),
            )


class _Lane:
    """A thread's stream, memory for the offsets that its kernels read, and room for results."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal, self._used_bytes = ordinal, 0
        self._offsets = self._room = PinnedMemory(OFFSETS_BYTES, ordinal)
        self._on_gpu = VramMemory(OFFSETS_BYTES, ordinal)
        self.stream = driver.new_stream()

    def upload(self, one: Lattice) -> int:
        """Return the address on the GPU."""
        offsets = np.concatenate([one.outer, one.units, one.inner], axis=1)
        if self._used_bytes + offsets.nbytes > OFFSETS_BYTES:
            driver.synchronize(self.stream)
            self.reset()
        first, end = self._used_bytes, self._used_bytes + offsets.nbytes
        self._offsets.bytes[first:end] = offsets.reshape(-1).view(np.uint8)
        self._used_bytes = end
        source, target = self._offsets.address + first, self._on_gpu.address + first
        driver.copy_async(target, source, offsets.nbytes, self.stream)
        return target

    def room(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if self._room is self._offsets or len(self._room.bytes) < num_bytes:
            self._room = PinnedMemory(num_bytes, self._ordinal)
        return self._room.bytes[:num_bytes]

    def reset(self) -> None:
        """Reuse the memory for offsets; the stream must be idle."""
        self._used_bytes = 0


def is_context_lost(ordinal: int) -> bool:
    """Return whether all CUDA calls of this process fail from now on, as after a fault."""
    try:
        with driver.on_gpu(ordinal):
            driver.synchronize_all()
    except SegmentError:
        return True
    return False


def _word_bytes(one: Lattice) -> int:
    bits = one.run_bytes | max(WORD_BYTES)
    for offsets in (one.outer, one.units, one.inner):
        bits |= int(np.bitwise_or.reduce(offsets, axis=None))
    return bits & -bits


def _cut(one: Lattice, max_runs: int) -> Iterator[Lattice]:
    if sum(one.shape) <= MAX_OFFSETS and one.num_runs <= max_runs:
        yield one
        return
    name = max(("outer", "units", "inner"), key=lambda axis: getattr(one, axis).shape[1])
    offsets = getattr(one, name)
    half = offsets.shape[1] // 2
    for some in (offsets[:, :half], offsets[:, half:]):
        yield from _cut(replace(one, **{name: some}), max_runs)
