"""The cases between two agents that already run, and what came of them: speeds, and what limits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvbus.bench.figures import quantile
from kvbus.bench.shapes import (
    BIG,
    HND_1,
    NHD_1,
    SMALL,
    TINY_RUNS,
    PairedBlocks,
    Shape,
    contiguous,
    scattered_tokens,
)
from kvbus.geometry import KvLayout
from kvbus.text import bytes_text, rate_text, time_text

if TYPE_CHECKING:
    from kvbus.lab.process import Taken

KIB, MIB = 1 << 10, 1 << 20

CROSS_LAYER = KvLayout.parse("NHD", cross_layer=True)
RUNS_16K = Shape("runs-16k", 2, 1, CROSS_LAYER)
RUNS_1M = Shape("runs-1m", 16, 8, CROSS_LAYER)


def in_order(source: Shape, _: Shape, num_tokens: int) -> PairedBlocks:
    """Of equal shapes: all runs merge."""
    return contiguous(num_tokens // source.block_size, source)


@dataclass(frozen=True, slots=True)
class PairCase:
    """Handoffs of one kind, ``times`` in each round; the name goes from side to side.

    ``run_bytes`` are what is contiguous on both sides, 0 where that is everything. With ``is_one``
    a block is handed over, which shows what a handoff costs beside its bytes.
    """

    name: str
    source: Shape
    target: Shape
    run_bytes: int
    place: Callable[[Shape, Shape, int], PairedBlocks] = scattered_tokens
    times: int = 1
    is_one: bool = False

    def tables(self, num_mib: int) -> PairedBlocks:
        """The blocks of both sides, the same wherever and whenever they are asked for."""
        most_bytes = 1 if self.is_one else num_mib * MIB
        num_blocks = max(1, most_bytes // self.source.block_bytes)
        return self.place(self.source, self.target, num_blocks * self.source.block_size)

    def num_handoffs(self, rounds: int) -> int:
        """The first compares every byte, and is not counted."""
        return 1 + rounds * self.times


CASES: Mapping[str, PairCase] = {
    case.name: case
    for case in (
        PairCase("one-block", SMALL, SMALL, 0, in_order, times=10, is_one=True),
        PairCase("hnd-to-nhd", HND_1, NHD_1, 256),
        PairCase("runs-512b", TINY_RUNS, TINY_RUNS, 512),
        PairCase("runs-16k", RUNS_16K, RUNS_16K, 16 * KIB),
        PairCase("runs-64k", SMALL, SMALL, 64 * KIB),
        PairCase("runs-256k", BIG, BIG, 256 * KIB),
        PairCase("runs-1m", RUNS_1M, RUNS_1M, MIB),
        PairCase("in-order", RUNS_1M, RUNS_1M, 0, in_order),
    )
}

READING = "reading"
PARTS = {
    "meeting": ("meeting the prefill agent", ("meeting", "resolving")),
    "turns": ("turns behind other fetches", ("queued",)),
    "round_trips": ("round trips to the prefill agent", ("claiming", "taking")),
    "tokens": ("tokens that were not ready", ("waiting",)),
    READING: ("reading", ("reading",)),
    "engine": ("engine and agent here", ()),
}
"""What takes the time of a handoff: in words, and which stages of the decode agent these are."""
READS = {
    "mapped": "memory of this machine",
    "direct": "network, or memory",
    "packed": "gathers, network, scatters",
}
SMALL_BYTES = 4 * MIB
"""A handoff of less takes hardly longer than one of next to nothing."""
SHORT_BYTES, OF_BEST = 64 * KIB, 0.7
"""Runs up to that length limit reads that have less than this part of the best speed."""


@dataclass(slots=True)
class Measured:
    """The handoffs of one case; the ``first`` one, in which the engines meet, is not counted."""

    case: PairCase
    first: "Taken"
    fetches: list["Taken"] = field(default_factory=list)

    def by_path(self) -> "Iterator[PathTimes]":
        """Those of each path that the agent took."""
        path_of = attrgetter("fetched.path")
        for path, fetches in groupby(sorted(self.fetches, key=path_of), key=path_of):
            yield PathTimes(self.case, path, list(fetches))


class PathTimes:
    """The handoffs of one case that went by one path: one or more."""

    def __init__(self, case: PairCase, path: str, fetches: Sequence["Taken"]) -> None:
        self.case, self.path, self.num_handoffs = case, path, len(fetches)
        self.num_bytes: int = fetches[0].fetched.num_bytes
        self.run_bytes = case.run_bytes or self.num_bytes
        seconds = [fetch.seconds for fetch in fetches]
        self.p50_s, self.p99_s = quantile(seconds, 0.5), quantile(seconds, 0.99)
        self.bytes_per_s = self.num_bytes / self.p50_s
        stages = [fetch.fetched.stages_s for fetch in fetches]
        self.parts_s = {
            part: median(sum(getattr(one, stage) for stage in names) for one in stages)
            for part, (_, names) in PARTS.items()
        }
        outside = (s - one.total for s, one in zip(seconds, stages, strict=True))
        self.parts_s["engine"] = median(outside)
        self.read_bytes_per_s = self.num_bytes / max(self.parts_s[READING], 1e-9)

    def limit(self, best_read_bytes_per_s: float) -> str:
        """The part that takes longest, with its share, and for reading why.

        ``best_read_bytes_per_s`` is what reads by this path can have.
        """
        part = max(self.parts_s, key=self.parts_s.__getitem__)
        text = f"{self.parts_s[part] / sum(self.parts_s.values()):.0%} {PARTS[part][0]}"
        return f"{text}: {self._why(best_read_bytes_per_s)}" if part == READING else text

    def _why(self, best_read_bytes_per_s: float) -> str:
        if self.num_bytes < SMALL_BYTES:
            return "one small copy" if self.path == "mapped" else "one small READ"
        is_slow = self.read_bytes_per_s < OF_BEST * best_read_bytes_per_s
        if is_slow and self.run_bytes <= SHORT_BYTES and self.path in ("mapped", "direct"):
            return "short runs"
        return READS.get(self.path, self.path)


def report(measured: Sequence[Measured]) -> tuple[Table, list[str], dict[str, Any]]:
    """The table of all cases, sentences below it, and both for JSON."""
    times = [one for case in measured for one in case.by_path()]
    table = Table("case", "block", "runs of", "path", box=None, pad_edge=False)
    for heading in ("times", "bytes", "GB/s", "ms p50", "p99"):
        table.add_column(heading, justify="right")
    table.add_column("what limits")
    rows = []
    for one in times:
        best = max(other.read_bytes_per_s for other in times if other.path == one.path)
        limit = one.limit(best)
        rows.append(_row(one, limit))
        table.add_row(
            one.case.name,
            bytes_text(one.case.source.block_bytes),
            bytes_text(one.run_bytes),
            one.path,
            str(one.num_handoffs),
            bytes_text(one.num_bytes),
            *map(_three_digits, (one.bytes_per_s / 1e9, one.p50_s * 1e3, one.p99_s * 1e3)),
            limit,
        )
    first_ms = _milliseconds(measured[0].first.seconds) if measured else None
    return table, list(_sentences(measured, times)), {"first_ms": first_ms, "figures": rows}


def _sentences(measured: Sequence[Measured], times: Sequence[PathTimes]) -> Iterator[str]:
    small = [one for one in times if one.case.is_one]
    large = [one for one in times if not one.case.is_one]
    if small:
        fixed, first = max(small, key=lambda one: one.num_handoffs), measured[0].first
        yield (
            f"A handoff of one block takes {time_text(fixed.p50_s)}, the first one of two engines"
            f" {time_text(first.seconds)}."
        )
    if large:
        best = max(large, key=lambda one: one.bytes_per_s)
        yield f"Most is {rate_text(best.bytes_per_s)}, {best.case.name} by {best.path}."


def _row(one: PathTimes, limit: str) -> dict[str, Any]:
    return {
        "case": one.case.name,
        "path": one.path,
        "block_bytes": one.case.source.block_bytes,
        "run_bytes": one.run_bytes,
        "num_bytes": one.num_bytes,
        "handoffs": one.num_handoffs,
        "bytes_per_s": float(f"{one.bytes_per_s:.6g}"),
        "p50_ms": _milliseconds(one.p50_s),
        "p99_ms": _milliseconds(one.p99_s),
        "parts_ms": {part: _milliseconds(seconds) for part, seconds in one.parts_s.items()},
        "limit": limit,
    }


def _three_digits(value: float) -> str:
    """Or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(seconds: float) -> float:
    return float(f"{seconds * 1e3:.6g}")
