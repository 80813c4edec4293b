"""Descriptors of the direct path: READs from the prefill engine's blocks into the decode engine's.

Refuses to count blocks: bytes are paired by position (token, layer, part, head), so any block sizes
and strides give the right pairs; what differs is only how long the contiguous runs are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbus.geometry import BlockTable
from kvbus.planning.pairs import (
    Offsets,
    Pair,
    Pattern,
    PlacedRank,
    Strides,
    pair_regions,
    pattern_of,
)

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
    """All pairs of regions between one prefill engine and one decode engine of equal ranks.

    Made once at the handshake, as shapes are constant; `descriptors` is called for each fetch.
    """

    def __init__(self, prefill: Iterable[PlacedRank], decode: Iterable[PlacedRank]) -> None:
        holders = {placed.rank.rank: placed for placed in prefill}
        bundles: dict[tuple[str, Strides, Strides], list[Pair]] = defaultdict(list)
        for reader in decode:
            for pair in pair_regions(holders[reader.rank.rank], reader):
                bundles[pair.group, pair.remote, pair.local].append(pair)
        self._bundles = [_Bundle(*key, pairs) for key, pairs in bundles.items()]

    def num_descriptors(self, num_tokens: int) -> int:
        """About how many READs so many tokens take, before neighbours are merged."""
        return sum(bundle.num_runs(num_tokens) for bundle in self._bundles)

    def descriptors(
        self,
        remote_tables: Mapping[str, BlockTable],
        local_tables: Mapping[str, BlockTable],
        *,
        start: int,
        stop: int,
    ) -> Descriptors:
        """READs of token positions [start, stop), neighbours merged, in ascending local address.

        Both sides' tables must cover the positions; raises `IndexError` when one does not.
        """
        found = [np.zeros((3, 0), dtype=np.int64)]
        for bundle in self._bundles:
            remote, local = remote_tables[bundle.group], local_tables[bundle.group]
            found.extend(bundle.rows(remote, local, start, stop))
        return _merged(np.concatenate(found, axis=1))


class _Bundle:
    """Pairs of one group with equal strides on each side: one pattern of runs serves them all."""

    def __init__(self, group: str, remote: Strides, local: Strides, pairs: list[Pair]) -> None:
        self.group = group
        self._remote = remote
        self._local = local
        self._pairs = pairs
        self._patterns: dict[int, Pattern] = {}

    def rows(
        self, remote: BlockTable, local: BlockTable, start: int, stop: int
    ) -> Iterator[Offsets]:
        """Arrays of shape (3, n): remote address, local address, bytes; one a piece length."""
        starts, lengths = _pieces(start, stop, self._remote.block_size, self._local.block_size)
        remote_bases = _piece_offsets(self._remote, remote, starts)
        local_bases = _piece_offsets(self._local, local, starts)
        for length in set(lengths.tolist()):
            chosen = lengths == length
            pattern = self._pattern(length)
            rows = np.empty((3, int(chosen.sum()), pattern.num_bytes.size), dtype=np.int64)
            np.add(remote_bases[chosen, None], pattern.remote, out=rows[0])
            np.add(local_bases[chosen, None], pattern.local, out=rows[1])
            rows[2] = pattern.num_bytes
            yield rows.reshape(3, -1)

    def num_runs(self, num_tokens: int) -> int:
        """Runs of so many tokens that start a block."""
        size = min(self._remote.block_size, self._local.block_size)
        return -(-num_tokens // size) * self._pattern(size).num_bytes.size

    def _pattern(self, num_tokens: int) -> Pattern:
        """Cached: there are no more patterns than tokens in a block."""
        if num_tokens not in self._patterns:
            self._patterns[num_tokens] = pattern_of(self._pairs, num_tokens)
        return self._patterns[num_tokens]


def _pieces(start: int, stop: int, *block_sizes: int) -> tuple[Offsets, Offsets]:
    """Cuts [start, stop) wherever either side's block ends: positions and lengths, in tokens."""
    if stop <= start:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    sizes = set(block_sizes)
    ends = [np.arange(start - start % size + size, stop, size) for size in sizes]
    starts = np.concatenate([np.array([start], dtype=np.int64), *ends])
    if len(sizes) > 1:
        starts = np.unique(starts)
    return starts, np.diff(starts, append=stop)


def _piece_offsets(strides: Strides, table: BlockTable, starts: Offsets) -> Offsets:
    rows = starts // strides.block_size - table.first_block
    if rows.size and rows[0] < 0:
        raise IndexError(f"block table starts only at block {table.first_block}")
    blocks = table.array()[rows].astype(np.int64)
    return blocks * strides.block_bytes + starts % strides.block_size * strides.token_bytes


def _merged(rows: Offsets) -> Descriptors:
    """Sorted by local address; rows that continue the one before on both sides become one."""
    if rows.shape[1] < 2:
        return Descriptors(_rows(rows[1], rows[2]), _rows(rows[0], rows[2]))
    remote, local, length = rows[:, np.argsort(rows[1], kind="stable")]
    continues = (remote[1:] == (remote + length)[:-1]) & (local[1:] == (local + length)[:-1])
    heads = np.flatnonzero(np.concatenate([[True], ~continues]))
    sums = np.add.reduceat(length, heads)
    return Descriptors(local=_rows(local[heads], sums), remote=_rows(remote[heads], sums))


def _rows(addresses: Offsets, lengths: Offsets) -> Rows:
    rows = np.zeros((addresses.size, 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    return rows
