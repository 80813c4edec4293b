"""Measures ways to copy 64 MiB of KV from blocks into blocks that this process has mapped both.

Run it from the repository's root: ``python benchmarks/run_copies.py [ROUNDS]``. Each round has
every way once, in turns, with other block tables. Printed are medians of the thread's CPU time,
which other processes of the machine disturb less than the time of the clock, and how much longer
the best other way took than the kernel.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout, lay_out_rank
from kvbus.memory import run_copy
from kvbus.memory.segment import SharedSegment
from kvbus.planning import PlacedRank, ReadMap, RunPlan, Runs

NUM_TOKENS, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2048, 8, 8, 128
JOB_BYTES = 8 << 20
SPARE = 2
"""A cache is so many times as large as what is copied."""
IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class Side:
    """The shape of one engine."""

    layout: str
    tp_size: int = 1
    block_size: int = 16


CASES = {
    "one run": (Side("HND"), Side("HND")),
    "256 KiB": (Side("HND", block_size=64), Side("HND", block_size=64)),
    "16 KiB": (Side("HND", block_size=4), Side("HND", block_size=4)),
    "TP 1 to 2": (Side("NHD"), Side("NHD", tp_size=2)),
    "TP 2 to 1": (Side("NHD", tp_size=2), Side("NHD")),
    "HND to NHD": (Side("HND"), Side("NHD")),
}


class Pair:
    """The memory of two engines, and the copies of requests between them."""

    def __init__(self, stack: ExitStack, sides: tuple[Side, Side], *, scattered: bool) -> None:
        self._sides, self._scattered = sides, scattered
        prefill, decode = (_placed(stack, side) for side in sides)
        ranks = ([one.rank for one in placed.values()] for placed in (prefill, decode))
        self._plan = RunPlan(prefill, decode, ReadMap(*ranks).shares())

    def runs(self, number: int) -> Runs:
        """Of request ``number``."""
        random = np.random.default_rng(number)
        tables = []
        for side in self._sides:
            needed = NUM_TOKENS // side.block_size
            ids = random.permutation(SPARE * needed)[:needed]
            ids = ids if self._scattered else np.arange(needed) + number % needed
            tables.append({"full": BlockTable.of(ids)})
        return self._plan.runs(*tables, {"full": (0, NUM_TOKENS)})


def _placed(stack: ExitStack, side: Side) -> dict[int, PlacedRank]:
    layers = tuple(range(NUM_LAYERS))
    group = GroupSpec("full", layers, side.block_size, NUM_HEADS, HEAD_DIM, "bfloat16")
    engine = EngineSpec("engine", "model", side.tp_size, (group,))
    placed, num_blocks = {}, SPARE * NUM_TOKENS // side.block_size
    for number in range(side.tp_size):
        rank = lay_out_rank(engine, number, KvLayout.parse(side.layout), num_blocks=num_blocks)
        (spec,) = rank.segments
        segment = stack.enter_context(SharedSegment(spec.size_bytes))
        segment.view()[:] = number + 1
        placed[number] = PlacedRank(engine, rank, {spec.segment_id: segment.address})
    return placed


def by_kernel(runs: Runs) -> None:
    """What kvbus does where it was compiled, in jobs as an agent makes them."""
    for job in runs.cut(JOB_BYTES):
        run_copy.copy_runs(job)


def by_numpy(runs: Runs) -> None:
    """What it does elsewhere."""
    for job in runs.cut(JOB_BYTES):
        for part in job.lattices:
            run_copy.copy_by_numpy(part)


def by_memmove(runs: Runs) -> None:
    """A call of C's memmove for each run."""
    for target, source, num_bytes in runs:
        ctypes.memmove(target, source, num_bytes)


_libc = ctypes.CDLL(None, use_errno=True)


def by_readv(runs: Runs) -> None:
    """process_vm_readv of this process itself, as many runs in a call as it takes."""
    for addresses, run_bytes in runs.by_length():
        iov = np.empty((*addresses.shape, 2), dtype=np.int64)
        iov[:, :, 0], iov[:, :, 1] = addresses, run_bytes
        for at in range(0, addresses.shape[1], IOV_MAX):
            num = ctypes.c_ulong(min(IOV_MAX, addresses.shape[1] - at))
            theirs, ours = (ctypes.c_void_p(iov[side, at:].ctypes.data) for side in (0, 1))
            copied = _libc.process_vm_readv(os.getpid(), ours, num, theirs, num, ctypes.c_ulong(0))
            assert copied == num.value * run_bytes


WAYS: dict[str, Callable[[Runs], None]] = {
    "kernel": by_kernel,
    "numpy": by_numpy,
    "memmove": by_memmove,
    "readv": by_readv,
}


def seconds(pair: Pair, rounds: int) -> dict[str, float]:
    """The median of each way."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, copy in WAYS.items():
            runs = pair.runs(number)
            began = time.thread_time()
            copy(runs)
            if number:  # the first touches the memory
                times[way].append(time.thread_time() - began)
    return {way: median(taken) for way, taken in times.items()}


def main() -> None:
    """Print a table."""
    if not run_copy.is_compiled():
        sys.exit("error: the kernel is not compiled here: run `python hatch_build.py`")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"| case | {' | '.join(WAYS)} | best other / kernel |")
    print("| --- |" + " --- |" * (len(WAYS) + 1))
    for name, sides in CASES.items():
        with ExitStack() as stack:
            taken = seconds(Pair(stack, sides, scattered=name != "one run"), rounds)
        best = min(one for way, one in taken.items() if way != "kernel") / taken["kernel"]
        cells = " | ".join(f"{one * 1e3:.1f} ms" for one in taken.values())
        print(f"| {name} | {cells} | {best:.1f} |", flush=True)


if __name__ == "__main__":
    main()
