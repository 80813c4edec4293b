"""Measures how fast this machine copies runs from blocks into blocks: the mapped path.

It copies between two pieces of shared memory, in this thread.
"""

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from kvbus.memory.run_copy import copy_runs
from kvbus.memory.segment import SharedSegment
from kvbus.planning import Copies
from kvbus.planning.pairs import Offsets

MEMORY_BYTES = 32 << 20
"""Of either side: together more than most caches hold, as KV is."""
COPY_BYTES = 4 << 20
NUM_COPIES = MEMORY_BYTES // COPY_BYTES
BLOCK_BYTES = 64 << 10
NUM_BLOCKS = MEMORY_BYTES // BLOCK_BYTES
SHORT_RUN_BYTES = 512
"""Of two tokens, one: where a reader has half of the heads, each run leaves as much out."""


@dataclass(frozen=True, slots=True)
class RunRates:
    """What copies cost here: seconds = bytes / rate + runs x seconds per run."""

    copy_bytes_per_s: float
    seconds_per_copied_run: float


def measure_runs() -> RunRates:
    """Measure: some 60 ms, most of it the first touch of 64 MiB of memory.

    Raises `SegmentError` when there is no room for it.
    """
    with ExitStack() as stack:
        segments = [
            stack.enter_context(SharedSegment(MEMORY_BYTES, name="kvbus-calibration"))
            for _ in range(2)
        ]
        for segment in segments:
            segment.view()[:] = 0  # every page is mapped from here on
        at = np.array([[segment.address] for segment in segments])
        return fit_runs(long_s=_median_s(at, _long_runs()), short_s=_median_s(at, _short_runs()))


def fit_runs(*, long_s: float, short_s: float) -> RunRates:
    """From the times of `COPY_BYTES` in long runs and in short ones.

    Where short runs were not slower, a run costs nothing.
    """
    num_long, num_short = COPY_BYTES // BLOCK_BYTES, COPY_BYTES // SHORT_RUN_BYTES
    seconds_per_run = max(0.0, (short_s - long_s) / (num_short - num_long))
    # Of what was measured, half is bytes at least: the rate stays above 0 whatever the noise.
    bytes_s = max(long_s - num_long * seconds_per_run, long_s / 2)
    return RunRates(COPY_BYTES / bytes_s, seconds_per_run)


def _long_runs() -> Copies:
    """Whole blocks, in any order on either side."""
    order = np.random.default_rng(0).permutation(NUM_BLOCKS)
    units = np.stack([order, order[::-1]]) * BLOCK_BYTES
    zero = np.zeros((2, 1), dtype=np.int64)
    return Copies(zero, units, zero, BLOCK_BYTES)


def _short_runs() -> Copies:
    """Whole blocks of the target, each half of the runs of a source block that is twice as long."""
    order = np.random.default_rng(0).permutation(NUM_BLOCKS)
    block, half = np.divmod(order, 2)
    units = np.stack([block * 2 * BLOCK_BYTES + half * SHORT_RUN_BYTES, order[::-1] * BLOCK_BYTES])
    runs = np.arange(BLOCK_BYTES // SHORT_RUN_BYTES) * SHORT_RUN_BYTES
    return Copies(
        np.zeros((2, 1), dtype=np.int64), units, np.stack([2 * runs, runs]), SHORT_RUN_BYTES
    )


def _median_s(at: Offsets, runs: Copies) -> float:
    """Of copies of `COPY_BYTES` between the two memories ``at`` these addresses."""
    times = []
    for units in np.split(runs.units, NUM_COPIES, axis=1):
        started_at = time.perf_counter()
        copy_runs([replace(runs, outer=at, units=units)])
        times.append(time.perf_counter() - started_at)
    return statistics.median(times)
