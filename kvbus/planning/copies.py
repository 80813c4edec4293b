"""Copies of the mapped path: from blocks into blocks, where one process has both mapped.

Refuses a source that lies outside of the memory that it is told of.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from kvbus.errors import GeometryError
from kvbus.planning.few_runs import Run
from kvbus.planning.pairs import Offsets

CACHED_BYTES = 512 << 10

Extents = Sequence[tuple[int, int]]
"""Addresses [first, end) of memory, in any order, none within another."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Runs of one length, in a lattice: one at each sum of an outer, a unit and an inner offset.

    Each array has the shape (2, n): row 0 is the source, row 1 the target. The offsets of
    ``outer`` are addresses; each row of ``units`` is one unit of tokens.
    """

    outer: Offsets
    units: Offsets
    inner: Offsets
    run_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many offsets each array has."""
        return self.outer.shape[1], self.units.shape[1], self.inner.shape[1]

    @property
    def num_runs(self) -> int:
        """Runs of the whole lattice."""
        num_outer, num_units, num_inner = self.shape
        return num_outer * num_units * num_inner

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return self.num_runs * self.run_bytes

    def addresses(self) -> Offsets:
        """Of each run, shape (2, num_runs): outer offsets step slowest, inner ones fastest."""
        found = np.empty((2, self.num_runs), dtype=np.int64)
        self.write_addresses(found)
        return found

    def write_addresses(self, found: Offsets) -> None:
        """Write `addresses` into rows that are contiguous."""
        for side, row in enumerate(found):
            corners = self.outer[side][:, None] + self.units[side]
            np.add(corners[:, :, None], self.inner[side], out=row.reshape(self.shape))


Job = tuple[Copies, ...]
"""Copies that are made in one go."""


def cut_copies(copies: Iterable[Copies], *, job_bytes: int) -> list[Job]:
    """Jobs of at most ``job_bytes`` that make each copy once; `check_sources` comes before.

    Small copies share a job. A large lattice is cut between outer offsets if it can be, so that
    units which are neighbours stay together; where a unit has several runs, between units, so that
    what the outer offsets take of one is read together. Then the other way, then within units and
    runs.
    """
    jobs: list[Job] = []
    room = 0
    for part in (part for one in copies for part in _parts(_for_caches(one), job_bytes)):
        if jobs and part.num_bytes <= room:
            jobs[-1] += (part,)
        else:
            jobs.append((part,))
            room = job_bytes
        room -= part.num_bytes
    return jobs


# Two readers of one token, each of half of its heads: by target, all of reader 0 comes first, and
# each line of the source is brought in twice, as the look-ahead of the CPU takes more than is asked
# for. In turns, what lies together is read together; likewise what is written together.
#
#     source       [t0 heads 0-3][t0 heads 4-7][t1 heads 0-3][t1 heads 4-7] ...
#     by target     1             33            2             34
#     interleaved   1             2             3             4
def interleaved(one: Copies) -> Copies:
    """The same runs, but outer offsets that are neighbours or equal on one side as inner ones."""
    num = one.outer.shape[1]
    for side in (0, 1):
        ascending = one.outer[:, np.argsort(one.outer[side], kind="stable")]
        steps = np.diff(ascending[side])
        apart = np.flatnonzero((steps != 0) & (steps != one.run_bytes))
        size = int(apart[0]) + 1 if apart.size else num
        if size == 1 or num % size:
            continue
        groups = ascending.reshape(2, -1, size)
        first, beside = groups[:, :, 0], groups[:, :1] - groups[:, :1, :1]
        if (groups - first[:, :, None] == beside).all():
            return replace(one, outer=first, inner=(one.inner[:, :, None] + beside).reshape(2, -1))
    return one


def check_sources(copies: Iterable[Copies], extents: Extents) -> None:
    """Raise `GeometryError` unless all source runs of an outer offset lie in one of ``extents``."""
    firsts, ends = np.array(sorted(extents), dtype=np.int64).reshape(-1, 2).T
    for one in copies:
        if not one.num_runs:
            continue
        lowest = one.outer[0] + one.units[0].min() + one.inner[0].min()
        highest = one.outer[0] + one.units[0].max() + one.inner[0].max() + one.run_bytes
        at = np.searchsorted(firsts, lowest, side="right") - 1
        if not (firsts.size and (at >= 0).all() and (highest <= ends[at]).all()):
            raise GeometryError("a copy would read outside of the memory that is mapped")


def check_runs(runs: Iterable[Run], extents: Extents) -> None:
    """As `check_sources`, for a few runs."""
    ordered = sorted(extents)
    for _, source, num_bytes in runs:
        at = bisect_right(ordered, source, key=itemgetter(0)) - 1
        if at < 0 or source + num_bytes > ordered[at][1]:
            raise GeometryError("a copy would read outside of the memory that is mapped")


# What is read in short pieces waits for memory, and what is written in them does not: stores leave
# the CPU on their way. So a unit is read in order, and written where that leads.
def _for_caches(one: Copies) -> Copies:
    """The same runs, read in order, and in turns, if they are more than a cache holds."""
    if one.num_bytes <= CACHED_BYTES:
        return one
    by_source = one.inner[:, np.argsort(one.inner[0], kind="stable")]
    return interleaved(replace(one, inner=by_source))


def _parts(one: Copies, job_bytes: int) -> Iterator[Copies]:
    """The lattice in parts of at most ``job_bytes``."""
    if one.num_bytes <= job_bytes:
        yield one
        return
    by_unit = one.inner.shape[1] > 1
    for name in ("units", "outer", "inner") if by_unit else ("outer", "units"):
        offsets: Offsets = getattr(one, name)
        num = offsets.shape[1]
        if num > 1:
            step = max(1, job_bytes * num // one.num_bytes)
            for at in range(0, num, step):
                fewer: dict[str, Any] = {name: offsets[:, at : at + step]}
                yield from _parts(replace(one, **fewer), job_bytes)
            return
    for first in range(0, one.run_bytes, job_bytes):
        num_bytes = min(job_bytes, one.run_bytes - first)
        yield replace(one, inner=one.inner + first, run_bytes=num_bytes)
