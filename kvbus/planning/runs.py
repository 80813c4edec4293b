"""Runs: bytes to move from source addresses to target addresses.

A few runs are integers, as a numpy call costs as much as a run. Arrays of offsets have the shape
(2, n): sources, targets.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbus.errors import GeometryError

CACHED_BYTES = 512 << 10
ZERO = np.zeros((2, 1), dtype=np.int64)

Offsets = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint64]
Run = tuple[int, int, int]
"""Target address, source address, bytes."""
Extents = Sequence[tuple[int, int]]
"""Memory at addresses [first, end), in any order; none contains another."""


class Reads(NamedTuple):
    """Rows of both arrays, shape (n, 3), are address, bytes, device."""

    local: Rows
    remote: Rows

    @property
    def num_bytes(self) -> int:
        return int(self.local[:, 1].sum())


@dataclass(frozen=True, slots=True)
class Lattice:
    """Runs of one length, at each sum of an outer, a unit and an inner offset.

    ``outer`` offsets are addresses; each column of ``units`` is one unit of tokens.
    """

    outer: Offsets
    units: Offsets
    inner: Offsets
    run_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer.shape[1], self.units.shape[1], self.inner.shape[1]

    @property
    def num_runs(self) -> int:
        num_outer, num_units, num_inner = self.shape
        return num_outer * num_units * num_inner

    @property
    def num_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    def addresses(self) -> Offsets:
        """Return shape (2, num_runs); outer offsets step slowest, inner ones fastest."""
        found = np.empty((2, self.num_runs), dtype=np.int64)
        self.write(*found)
        return found

    def write(self, sources: Offsets, targets: Offsets) -> None:
        for side, row in enumerate((sources, targets)):
            corners = self.outer[side][:, None] + self.units[side]
            np.add(corners[:, :, None], self.inner[side], out=row.reshape(self.shape))


@dataclass(frozen=True, slots=True)
class Runs:
    """Targets do not overlap."""

    few: tuple[Run, ...] = ()
    lattices: tuple[Lattice, ...] = ()

    def __iter__(self) -> Iterator[Run]:
        for addresses, run_bytes in self.by_length():
            for source, target in addresses.T.tolist():
                yield target, source, run_bytes

    def by_length(self) -> Iterator[tuple[Offsets, int]]:
        """Yield addresses, shape (2, n), and the bytes of each of these runs."""
        for one in self.all_lattices():
            yield one.addresses(), one.run_bytes

    def all_lattices(self) -> Iterator[Lattice]:
        for length in {run[2] for run in self.few}:
            alike = [(source, target) for target, source, num in self.few if num == length]
            yield Lattice(np.array(alike, dtype=np.int64).T, ZERO, ZERO, length)
        yield from self.lattices

    @property
    def num_bytes(self) -> int:
        num_bytes = 0
        for _, _, run_bytes in self.few:
            num_bytes += run_bytes
        for one in self.lattices:
            num_bytes += one.num_bytes
        return num_bytes

    def check_sources(self, extents: Extents) -> None:
        """Raise `GeometryError` unless each source lies within one of ``extents``."""
        ordered = sorted(extents)
        for _, source, num_bytes in self.few:
            at = bisect_right(ordered, source, key=itemgetter(0)) - 1
            if at < 0 or source + num_bytes > ordered[at][1]:
                raise _outside()
        for one in self.lattices:
            if not one.num_runs:
                continue
            firsts, ends = np.array(ordered, dtype=np.int64).reshape(-1, 2).T
            lowest = one.outer[0] + one.units[0].min() + one.inner[0].min()
            highest = one.outer[0] + one.units[0].max() + one.inner[0].max() + one.run_bytes
            places = np.searchsorted(firsts, lowest, side="right") - 1
            if not (firsts.size and (places >= 0).all() and (highest <= ends[places]).all()):
                raise _outside()

    def with_targets_in(self, extents: Extents) -> "Runs":
        """Return the runs whose target begins in one of ``extents``."""
        bounds = np.array(sorted(extents), dtype=np.int64).reshape(-1)
        found: list[Lattice] = []
        for one in self.all_lattices():
            first = one.outer[1] + one.units[1].min() + one.inner[1].min()
            is_in = np.searchsorted(bounds, first, side="right") % 2 == 1
            if is_in.any():
                found.append(replace(one, outer=one.outer[:, is_in]))
        return Runs(lattices=tuple(found))

    def moved(self, *, source_bytes: int = 0, target_bytes: int = 0) -> "Runs":
        by = np.array([[source_bytes], [target_bytes]], dtype=np.int64)
        return Runs(
            tuple((to + target_bytes, out_of + source_bytes, num) for to, out_of, num in self.few),
            tuple(replace(one, outer=one.outer + by) for one in self.lattices),
        )

    def reads(self, *, local_device: int = 0, remote_device: int = 0) -> Reads:
        """Return READs into the targets, neighbours merged, by ascending local address."""
        if self.lattices:
            found, end = np.empty((3, sum(one.num_runs for one in self.lattices)), np.int64), 0
            for one in self.lattices:
                at, end = end, end + one.num_runs
                one.write(sources=found[1, at:end], targets=found[0, at:end])
                found[2, at:end] = one.run_bytes
            targets, sources, sizes = _merged(found)
        else:
            few = np.array(_merged_few(self.few), dtype=np.int64)
            targets, sources, sizes = few.reshape(-1, 3).T
        return Reads(_rows(targets, sizes, local_device), _rows(sources, sizes, remote_device))

    def cut(self, job_bytes: int) -> list["Runs"]:
        jobs: list[Runs] = []
        room = 0
        for one in self.all_lattices():
            for part in _cut(_for_caches(one), job_bytes):
                if jobs and part.num_bytes <= room:
                    jobs[-1] = Runs(lattices=(*jobs[-1].lattices, part))
                else:
                    jobs.append(Runs(lattices=(part,)))
                    room = job_bytes
                room -= part.num_bytes
        return jobs


def _outside() -> GeometryError:
    return GeometryError("a copy would read outside of the memory that is mapped")


def _merged_few(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for target, source, num_bytes in sorted(runs):
        if merged:
            before, from_before, bytes_before = merged[-1]
            if before + bytes_before == target and from_before + bytes_before == source:
                merged[-1] = before, from_before, bytes_before + num_bytes
                continue
        merged.append((target, source, num_bytes))
    return merged


def _merged(runs: Offsets) -> Offsets:
    if not (runs[0, 1:] > runs[0, :-1]).all():  # nested lattices ascend
        runs = runs.take(np.argsort(runs[0], kind="stable"), axis=1)
    ends = runs[:2] + runs[2]
    continues = (runs[:2, 1:] == ends[:, :-1]).all(axis=0)
    if not continues.any():
        return runs
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    last = np.append(first[1:], runs.shape[1]) - 1
    merged = runs.take(first, axis=1)
    merged[2] = ends[0, last] - merged[0]
    return merged


def _rows(addresses: Offsets, num_bytes: Offsets, device: int) -> Rows:
    rows = np.empty((addresses.size, 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, num_bytes, device
    return rows.view(np.uint64)


def _cut(one: Lattice, job_bytes: int) -> Iterator[Lattice]:
    """Cuts between outer offsets keep neighbouring units together.

    Cuts between units of several runs come next, to read their bytes together.
    """
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
                yield from _cut(replace(one, **fewer), job_bytes)
            return
    for first in range(0, one.run_bytes, job_bytes):
        num_bytes = min(job_bytes, one.run_bytes - first)
        yield replace(one, inner=one.inner + first, run_bytes=num_bytes)


# Short reads wait for memory. Short writes do not: stores leave the CPU on their own. So a unit is
# read in order, and written in the resulting one.
def _for_caches(one: Lattice) -> Lattice:
    if one.num_bytes <= CACHED_BYTES:
        return one
    by_source = one.inner[:, np.argsort(one.inner[0], kind="stable")]
    return _interleaved(replace(one, inner=by_source))


# Suppose that two readers need half of the heads of each token. By target, all of reader 0 comes
# first, and each line of the source is fetched twice, as the CPU prefetches more than is needed.
# Interleaved, bytes that lie together are read together, and likewise written together.
#
#     source       [t0 heads 0-3][t0 heads 4-7][t1 heads 0-3][t1 heads 4-7] ...
#     by target     1             33            2             34
#     interleaved   1             2             3             4
def _interleaved(one: Lattice) -> Lattice:
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
