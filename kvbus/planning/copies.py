"""Copies of the mapped path: from blocks into blocks, where one process has both mapped.

Refuses a source that lies outside of the memory that it is told of.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvbus.errors import GeometryError
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

    Small copies share a job. A large lattice is cut where its parts stay long: between outer
    offsets if it can be, else between units, then inner offsets, then within runs.
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


def _parts(one: Copies, job_bytes: int) -> Iterator[Copies]:
    """The lattice in parts of at most ``job_bytes``."""
    if one.num_bytes <= job_bytes:
        yield one
        return
    num_outer, num_units, num_inner = one.shape
    if num_outer > 1:
        for outer in _columns(one.outer, job_bytes // (one.num_bytes // num_outer)):
            yield from _parts(replace(one, outer=outer), job_bytes)
    elif num_units > 1:
        for units in _columns(one.units, job_bytes // (one.num_bytes // num_units)):
            yield from _parts(replace(one, units=units), job_bytes)
    elif num_inner > 1:
        for inner in _columns(one.inner, job_bytes // one.run_bytes):
            yield from _parts(replace(one, inner=inner), job_bytes)
    else:
        for first in range(0, one.run_bytes, job_bytes):
            yield replace(
                one, inner=one.inner + first, run_bytes=min(job_bytes, one.run_bytes - first)
            )


def _columns(offsets: Offsets, most: int) -> Iterator[Offsets]:
    """At most so many offsets at a time; one at least."""
    step = max(1, most)
    return (offsets[:, at : at + step] for at in range(0, offsets.shape[1], step))
