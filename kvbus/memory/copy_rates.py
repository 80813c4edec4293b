"""Measures how fast this machine gathers runs of bytes into one piece, and scatters them again.

It copies between shared memory and a warm slot by the torch operations that `copying` uses most,
in runs of two lengths, and on one core, as the cost model has it of a stage.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvbus.memory.segment import SharedSegment

SLOT_BYTES = 4 << 20
NUM_SLOTS = 16
"""So many fit the shared memory: more than most caches hold, as KV is."""
NUM_COPIES = 8
SHORT_RUN_BYTES, LONG_RUN_BYTES = 256, 16 << 10
"""A token of one head, and a block of few heads."""
WORD = torch.complex128


@dataclass(frozen=True, slots=True)
class CopyRates:
    """What copies cost here: seconds = bytes / rate + runs x seconds per run."""

    gather_bytes_per_s: float
    seconds_per_gathered_run: float
    scatter_bytes_per_s: float
    seconds_per_scattered_run: float


def measure_copies() -> CopyRates:
    """Measure, in this thread: some 70 ms, most of it the first touch of 64 MiB of memory.

    Raises `SegmentError` when there is no room for it.
    """
    size_bytes = NUM_SLOTS * SLOT_BYTES
    with _one_thread(), SharedSegment(size_bytes, name="kvbus-calibration") as segment:
        segment.tensor.zero_()  # every page is mapped from here on
        shared = segment.tensor.view(WORD)
        slot = torch.zeros(SLOT_BYTES // WORD.itemsize, dtype=WORD)
        times = {
            (run_bytes, scatter): _median_s(shared, slot, run_bytes, scatter=scatter)
            for run_bytes in (SHORT_RUN_BYTES, LONG_RUN_BYTES)
            for scatter in (False, True)
        }
    gather, scatter = (
        fit_copies(short_s=times[SHORT_RUN_BYTES, way], long_s=times[LONG_RUN_BYTES, way])
        for way in (False, True)
    )
    return CopyRates(*gather, *scatter)


def fit_copies(*, short_s: float, long_s: float) -> tuple[float, float]:
    """Bytes per second and seconds per run, from the times of one slot in short and long runs.

    Where short runs were not slower, a run costs nothing.
    """
    num_short, num_long = SLOT_BYTES // SHORT_RUN_BYTES, SLOT_BYTES // LONG_RUN_BYTES
    seconds_per_run = max(0.0, (short_s - long_s) / (num_short - num_long))
    # Of what was measured, half is bytes at least: the rate stays above 0 whatever the noise.
    bytes_s = max(long_s - num_long * seconds_per_run, long_s / 2)
    return SLOT_BYTES / bytes_s, seconds_per_run


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _median_s(shared: torch.Tensor, slot: torch.Tensor, run_bytes: int, *, scatter: bool) -> float:
    """Of the copies between the slot and runs that lie anywhere."""
    there, here = (words.view(-1, run_bytes // WORD.itemsize) for words in (shared, slot))
    rows = torch.randperm(len(there), generator=torch.Generator().manual_seed(0))
    times = []
    for chosen in rows[: NUM_COPIES * len(here)].view(NUM_COPIES, -1):
        started_at = time.perf_counter()
        if scatter:
            there.index_copy_(0, chosen, here)
        else:
            torch.index_select(there, 0, chosen, out=here)
        times.append(time.perf_counter() - started_at)
    return statistics.median(times)
