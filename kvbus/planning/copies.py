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
    """Jobs of at most ``job_bytes`` that make each copy once, in the order given.

    Small copies share a job. A large lattice is cut between outer offsets if it can be, so that
    units which are neighbours stay together; where a unit has several runs, between units, so that
    what the outer offsets take of one is read together. Then the other way, then within units and
    runs.
    """
    jobs: list[Job] = []
    room = 0
    for part in (part for one in copies for part in _parts(one, job_bytes)):
        if jobs and part.num_bytes <= room:
            jobs[-1] += (part,)
        else:
            jobs.append((part,))
            room = job_bytes
        room -= part.num_bytes
    return jobs


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
