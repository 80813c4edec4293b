"""What came of one case on one path, and which part of a handoff took most of its time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from statistics import median

from kvbus.bench.engines import TimedFetch
from kvbus.bench.sides.cases import KIB, MIB, PairCase
from kvbus.bench.stats import quantile

READING, ENGINE = "reading", "engine"
PARTS = {
    "meeting": ("meeting", "resolving"),
    "turns": ("queued",),
    "round_trips": ("claiming", "taking"),
    "tokens": ("waiting",),
    READING: ("reading",),
}
"""The stages of the decode agent, by what takes their time."""
TEXTS = {
    "meeting": "meeting the prefill agent",
    "turns": "turns behind other fetches",
    "round_trips": "round trips to the prefill agent",
    "tokens": "tokens that were not ready",
    READING: "reading",
    ENGINE: "engine and agent here",
}
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
    first: TimedFetch
    fetches: list[TimedFetch] = field(default_factory=list)

    def by_path(self) -> "Iterator[PathTimes]":
        """Those of each path that the agent took."""
        path_of = attrgetter("fetched.path")
        for path, fetches in groupby(sorted(self.fetches, key=path_of), key=path_of):
            yield PathTimes(self.case, path, list(fetches))


@dataclass(frozen=True, slots=True)
class PathTimes:
    """The handoffs of one case that went by one path: one or more."""

    case: PairCase
    path: str
    fetches: Sequence[TimedFetch]

    @property
    def num_bytes(self) -> int:
        """Of one handoff."""
        return self.fetches[0].fetched.num_bytes

    @property
    def run_bytes(self) -> int:
        """What is contiguous on both sides."""
        return self.case.run_bytes or self.num_bytes

    @property
    def bytes_per_s(self) -> float:
        """Of the median handoff."""
        return self.num_bytes / self.quantile_s(0.5)

    def quantile_s(self, fraction: float) -> float:
        """Seconds of handoffs, from the call of `fetch` to its end."""
        return quantile([fetch.seconds for fetch in self.fetches], fraction)

    @property
    def parts_s(self) -> dict[str, float]:
        """Median seconds of each part of a handoff; what no stage has is the engine's."""
        stages = [fetch.fetched.stages_s for fetch in self.fetches]
        parts = {
            part: median(sum(getattr(one, stage) for stage in names) for one in stages)
            for part, names in PARTS.items()
        }
        outside = (fetch.seconds - fetch.fetched.stages_s.total for fetch in self.fetches)
        return {**parts, ENGINE: median(outside)}

    @property
    def read_bytes_per_s(self) -> float:
        """Of the reading alone."""
        return self.num_bytes / max(self.parts_s[READING], 1e-9)

    def limit(self, best_read_bytes_per_s: float) -> str:
        """The part that takes longest, with its share, and for reading why.

        ``best_read_bytes_per_s`` is what reads by this path can have.
        """
        parts_s = self.parts_s
        part = max(parts_s, key=parts_s.__getitem__)
        text = f"{parts_s[part] / sum(parts_s.values()):.0%} {TEXTS[part]}"
        return f"{text}: {self._why(best_read_bytes_per_s)}" if part == READING else text

    def _why(self, best_read_bytes_per_s: float) -> str:
        if self.num_bytes < SMALL_BYTES:
            return "one small copy" if self.path == "mapped" else "one small READ"
        is_slow = self.read_bytes_per_s < OF_BEST * best_read_bytes_per_s
        if is_slow and self.run_bytes <= SHORT_BYTES and self.path in ("mapped", "direct"):
            return "short runs"
        return READS.get(self.path, self.path)
