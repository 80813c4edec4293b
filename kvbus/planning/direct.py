"""Descriptors of the direct path: READs from the prefill engine's blocks into the decode engine's.

Bytes are paired by position (token, layer, part, head), never by counting blocks. So any block
sizes and strides give the right pairs; what differs is only how long the contiguous runs are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbus.geometry import BlockTable
from kvbus.planning.copies import Copies
from kvbus.planning.few_runs import MAX_RUNS, FewRuns, Run, merged_rows
from kvbus.planning.mapping import Share
from kvbus.planning.pairs import (
    Form,
    Offsets,
    Pattern,
    PlacedRank,
    Strides,
    pair_regions,
    pattern_of,
)
from kvbus.planning.spans import Spans

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Row i reads ``remote[i]`` into ``local[i]``; both of shape (n, 3): address, bytes, device."""

    local: Rows
    remote: Rows

    @property
    def num_bytes(self) -> int:
        """Bytes that the READs move."""
        return int(self.local[:, 1].sum())


class DirectPlan:
    """The READs of ``shares``, between ranks that are given by number.

    Made once, as shapes are constant; `descriptors` is called for each fetch.
    """

    def __init__(
        self,
        prefill: Mapping[int, PlacedRank],
        decode: Mapping[int, PlacedRank],
        shares: Iterable[Share],
    ) -> None:
        corners: dict[Form, list[tuple[int, int]]] = defaultdict(list)
        for share in shares:
            for pair in pair_regions(prefill[share.holder], decode[share.reader], share):
                corners[pair.form].append((pair.remote, pair.local))
        self._bundles = [_Bundle(form, at) for form, at in corners.items()]

    def num_descriptors(self, spans: Spans) -> int:
        """About how many READs these positions take, before neighbours are merged."""
        return sum(b.num_runs(spans[b.group][1] - spans[b.group][0]) for b in self._bundles)

    def descriptors(
        self,
        remote_tables: Mapping[str, BlockTable],
        local_tables: Mapping[str, BlockTable],
        spans: Spans,
    ) -> Descriptors:
        """READs of the positions in ``spans``, neighbours merged, in ascending local address.

        Both sides' tables must cover the positions; raises `IndexError` when one does not. A group
        without positions needs no tables.
        """
        runs = self.few_runs(remote_tables, local_tables, spans)
        if runs is not None:
            return Descriptors(*merged_rows(runs))
        copies = self.copies(remote_tables, local_tables, spans)
        remote_at, local_at, num_bytes = _merged(_ascending(_runs(copies)))
        return Descriptors(local=_rows(local_at, num_bytes), remote=_rows(remote_at, num_bytes))

    def copies(
        self,
        remote_tables: Mapping[str, BlockTable],
        local_tables: Mapping[str, BlockTable],
        spans: Spans,
    ) -> list[Copies]:
        """The same bytes as copies, for a process that has both sides at their addresses.

        Targets ascend where the offsets nest. Tables and errors are as for `descriptors`.
        """
        copies: list[Copies] = []
        for bundle in self._bundles:
            start, stop = spans[bundle.group]
            if start < stop:
                remote, local = remote_tables[bundle.group], local_tables[bundle.group]
                copies.extend(bundle.copies(remote, local, start, stop))
        return copies

    def few_runs(
        self,
        remote_tables: Mapping[str, BlockTable],
        local_tables: Mapping[str, BlockTable],
        spans: Spans,
    ) -> list[Run] | None:
        """The same bytes as runs, not merged; None when there are many. Tables and errors alike."""
        if not self._has_few(spans):
            return None
        runs: list[Run] = []
        for bundle in self._bundles:
            start, stop = spans[bundle.group]
            if start < stop:
                remote, local = remote_tables[bundle.group], local_tables[bundle.group]
                runs.extend(bundle.few.runs(remote, local, start, stop))
        return runs

    def _has_few(self, spans: Spans) -> bool:
        """Few by the estimate, then counted: units that are cut short may have more runs."""
        if self.num_descriptors(spans) > MAX_RUNS:
            return False
        return sum(b.few.count(*spans[b.group]) for b in self._bundles) <= MAX_RUNS


class _Bundle:
    """Pairs of one form: one pattern of runs serves them all."""

    def __init__(self, form: Form, corners: list[tuple[int, int]]) -> None:
        self.group = form.group
        self._form = form
        self._corners = np.array(corners, dtype=np.int64).T
        self._patterns: dict[int, Pattern] = {}
        self.few = FewRuns(form, self._pattern)

    def copies(
        self, remote: BlockTable, local: BlockTable, start: int, stop: int
    ) -> Iterator[Copies]:
        """The runs of positions [start, stop), a lattice for each length of a unit."""
        form = self._form
        starts, lengths = cut_into_units(
            start, stop, {form.remote.block_size, form.local.block_size}
        )
        units = np.stack(
            [_unit_offsets(form.remote, remote, starts), _unit_offsets(form.local, local, starts)]
        )
        for length in np.unique(lengths).tolist():
            alike = units[:, lengths == length]
            order = np.argsort(alike[1], kind="stable")
            outer, inner, run_bytes = self._pattern(length)
            yield Copies(outer, alike[:, order], inner, run_bytes)

    def num_runs(self, num_tokens: int) -> int:
        """Runs of so many tokens that start a block."""
        size = min(self._form.remote.block_size, self._form.local.block_size)
        return -(-num_tokens // size) * self._pattern(size).num_runs

    def _pattern(self, num_tokens: int) -> Pattern:
        """Over all pairs; cached, as there are no more patterns than tokens in a block."""
        if num_tokens not in self._patterns:
            pattern = pattern_of(self._form, num_tokens)
            outer = (self._corners[:, :, None] + pattern.outer[:, None, :]).reshape(2, -1)
            outer = outer[:, np.argsort(outer[1], kind="stable")]
            self._patterns[num_tokens] = pattern._replace(outer=outer)
        return self._patterns[num_tokens]


def cut_into_units(start: int, stop: int, sizes: Set[int]) -> tuple[Offsets, Offsets]:
    """Units lie in one block of either size: their first positions, and lengths in tokens."""
    ends = [np.arange(start - start % size + size, stop, size) for size in sizes]
    starts = np.concatenate([np.array([start], dtype=np.int64), *ends])
    if len(sizes) > 1:
        starts = np.unique(starts)
    return starts, np.diff(starts, append=stop)


def _unit_offsets(strides: Strides, table: BlockTable, starts: Offsets) -> Offsets:
    rows = starts // strides.block_size - table.first_block
    if rows[0] < 0:
        raise IndexError(f"block table starts only at block {table.first_block}")
    blocks = table.array()[rows].astype(np.int64)
    return blocks * strides.block_bytes + starts % strides.block_size * strides.token_bytes


def _runs(copies: Sequence[Copies]) -> Offsets:
    """Of shape (3, n): remote address, local address, bytes; each lattice ascends if it nests."""
    runs = np.empty((3, sum(one.num_runs for one in copies)), dtype=np.int64)
    end = 0
    for one in copies:
        start, end = end, end + one.num_runs
        one.write_addresses(runs[:2, start:end])
        runs[2, start:end] = one.run_bytes
    return runs


def _ascending(runs: Offsets) -> Offsets:
    """By local address; what is not so already is made of few ascending sequences."""
    local = runs[1]
    if (local[1:] > local[:-1]).all():
        return runs
    return runs.take(np.argsort(local, kind="stable"), axis=1)


def _merged(runs: Offsets) -> Offsets:
    """Runs that continue the one before on both sides become one with it."""
    ends = runs[:2] + runs[2]
    continues = (runs[0, 1:] == ends[0, :-1]) & (runs[1, 1:] == ends[1, :-1])
    if not continues.any():
        return runs
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    last = np.append(first[1:], runs.shape[1]) - 1
    merged = runs.take(first, axis=1)
    merged[2] = ends[1, last] - merged[1]
    return merged


def _rows(addresses: Offsets, num_bytes: Offsets) -> Rows:
    rows = np.empty((addresses.size, 3), dtype=np.int64)
    rows[:, 0] = addresses
    rows[:, 1] = num_bytes
    rows[:, 2] = 0
    return rows.view(np.uint64)
