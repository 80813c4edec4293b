"""Works out what fetches of given shares are on each path: bytes, descriptors, runs.

Each block counts as lying apart from every other, as in a busy cache, so neighbours that happen to
merge are not foreseen.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from kvbus.geometry import Box, num_blocks_for
from kvbus.planning.boxes import reader_order
from kvbus.planning.fetch_shape import FetchShape, Path, PathWork
from kvbus.planning.mapping import Share
from kvbus.planning.pairs import Form, pair_regions, pattern_of
from kvbus.planning.run_plan import PlacedRank, slot_rank
from kvbus.planning.runs import Offsets
from kvbus.planning.spans import Spans

Ranks = Mapping[int, PlacedRank]


class FetchWork:
    """What fetches of ``shares`` are, between ranks that are given by number.

    The packed path takes ``joined`` shares, or the same as the others. Made once for each peer, as
    shapes are constant; `shape` is called for each fetch. Addresses of the ranks do not matter, but
    for whether there are any.
    """

    def __init__(
        self,
        prefill: Ranks,
        decode: Ranks,
        shares: Sequence[Share],
        joined: Sequence[Share] | None = None,
    ) -> None:
        self._sizes, self._joined_sizes = Counter[_Size](), Counter[_Size]()
        self._least_box_bytes = {Path.PACKED: 1, Path.REORDERED: 1}
        self._can_direct = self.can_reorder = True
        self._runs, self._reordered_read = _Runs(), _Runs()
        for share in shares:
            holder, reader = prefill[share.holder], decode[share.reader]
            self._can_direct &= holder.direct and reader.direct
            self.can_reorder &= reader.direct
            self._add(holder.somewhere(), reader.somewhere(), share)
        for share in shares if joined is None else joined:
            size = _size(decode[share.readers[0]], share)
            self._joined_sizes[size] += 1
            self._need(Path.PACKED, size.layer_bytes)

    def least_box_bytes(self, path: Path) -> int:
        """The smallest box that `cut_into_boxes` can make of every share; 1 when there is none."""
        return self._least_box_bytes.get(path, 1)

    def repeated_bytes(self, spans: Spans) -> int:
        """Bytes that joined shares read once, and the others again for each further reader."""
        return _sum(self._sizes, spans)[0] - _sum(self._joined_sizes, spans)[0]

    def shape(
        self, spans: Spans, *, slot_bytes: int | None = None, mapped: bool = False
    ) -> FetchShape:
        """What a fetch of these positions is on each path that it can take.

        It can be copied when this process has both sides ``mapped``. It cannot go in boxes when
        nothing is moved, or when their least box is larger than ``slot_bytes``; nor reordered when
        a reader's regions have different orders or it is unregistered; nor direct when either side
        is.
        """
        num_bytes, num_shares = _sum(self._sizes, spans)
        in_boxes = {
            path
            for path, least in self._least_box_bytes.items()
            if num_bytes and (slot_bytes is None or least <= slot_bytes)
        }
        shape = {}
        num_runs = self._runs.count(spans) if mapped or self._can_direct else 0
        if self._can_direct:
            shape[Path.DIRECT] = PathWork(num_bytes=num_bytes, num_runs=num_runs)
        if Path.PACKED in in_boxes:
            joined_bytes, num_joined = _sum(self._joined_sizes, spans)
            shape[Path.PACKED] = PathWork(num_bytes=joined_bytes, num_shares=num_joined)
        if Path.REORDERED in in_boxes and self.can_reorder:
            shape[Path.REORDERED] = PathWork(
                num_bytes=sum(s.slot_bytes(spans) * times for s, times in self._sizes.items()),
                num_runs=self._reordered_read.count(spans),
                num_shares=num_shares,
            )
        if mapped:
            shape[Path.MAPPED] = PathWork(num_bytes=num_bytes, num_runs=num_runs)
        return shape

    def _add(self, holder: PlacedRank, reader: PlacedRank, share: Share) -> None:
        """What is read into blocks: directly, and from slots in the reader's order."""
        size = _size(reader, share)
        self._sizes[size] += 1
        either, here = {_block_size(holder, share), size.block_size}, {size.block_size}
        self._runs.add(holder, reader, share, cuts=either)
        order = reader_order(reader.rank.regions, reader.engine.group(share.group))
        if order is None:
            self.can_reorder = False
            return
        self._need(Path.REORDERED, size.layer_bytes * order.block_size)
        slot = slot_rank(reader, _box(holder, reader, share), order)
        self._reordered_read.add(slot, reader, share, cuts=here)

    def _need(self, path: Path, num_bytes: int) -> None:
        self._least_box_bytes[path] = max(self._least_box_bytes[path], num_bytes)


class _Size(NamedTuple):
    """How large a share is at each position of its table, and in which blocks a reader has it."""

    group: str
    position_bytes: int
    num_layers: int
    block_size: int

    @property
    def layer_bytes(self) -> int:
        return self.position_bytes // self.num_layers

    def num_bytes(self, spans: Spans) -> int:
        start, stop = spans[self.group]
        return max(0, stop - start) * self.position_bytes

    def slot_bytes(self, spans: Spans) -> int:
        """Of the slots in the reader's order, which have whole blocks."""
        start, stop = spans[self.group]
        if stop <= start:
            return 0
        num_blocks = num_blocks_for(stop, self.block_size) - start // self.block_size
        return num_blocks * self.block_size * self.position_bytes


def _size(reader: PlacedRank, share: Share) -> _Size:
    group = reader.engine.group(share.group)
    return _Size(share.group, share.position_bytes(group), len(share.layers), group.block_size)


def _sum(sizes: Counter[_Size], spans: Spans) -> tuple[int, int]:
    """Bytes of all shares at these positions, and how many have any."""
    num_bytes = sum(size.num_bytes(spans) * times for size, times in sizes.items())
    return num_bytes, sum(times for size, times in sizes.items() if size.num_bytes(spans))


def _block_size(placed: PlacedRank, share: Share) -> int:
    return placed.engine.group(share.group).block_size


def _box(holder: PlacedRank, reader: PlacedRank, share: Share) -> Box:
    """Of the share, long enough for every pattern of its blocks."""
    stop = 2 * max(_block_size(holder, share), _block_size(reader, share))
    heads = (share.first_head, share.num_heads)
    return Box(share.group, share.layers, share.parts, *heads, 0, stop)


class _Runs:
    """Counts the runs that are contiguous on both sides of some copies."""

    def __init__(self) -> None:
        self._forms = Counter[tuple[Form, frozenset[int]]]()
        self._known: dict[tuple[Form, int], int] = {}

    def add(self, source: PlacedRank, target: PlacedRank, share: Share, *, cuts: set[int]) -> None:
        """A copy of ``share``; no run goes past a multiple of one of ``cuts`` tokens."""
        for pair in pair_regions(source, target, share):
            self._forms[pair.form, frozenset(cuts)] += 1

    def count(self, spans: Spans) -> int:
        """Runs of all copies of these positions."""
        return sum(
            times * num_units * self._num_runs(form, length)
            for (form, cuts), times in self._forms.items()
            for length, num_units in _units(*spans[form.group], cuts)
        )

    def _num_runs(self, form: Form, num_tokens: int) -> int:
        """Cached: there are no more lengths than tokens in a block."""
        if (form, num_tokens) not in self._known:
            self._known[form, num_tokens] = pattern_of(form, num_tokens).num_runs
        return self._known[form, num_tokens]


def _units(start: int, stop: int, cuts: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Lengths of the units of [start, stop) between multiples of ``cuts``, and how many."""
    if stop > start:
        _, lengths = cut_into_units(start, stop, cuts)
        lengths, times = np.unique(lengths, return_counts=True)
        yield from zip(lengths.tolist(), times.tolist(), strict=True)


def cut_into_units(start: int, stop: int, sizes: Set[int]) -> tuple[Offsets, Offsets]:
    """Units lie in one block of either size: their first positions, and lengths in tokens."""
    ends = [np.arange(start - start % size + size, stop, size) for size in sizes]
    starts = np.concatenate([np.array([start], dtype=np.int64), *ends])
    if len(sizes) > 1:
        starts = np.unique(starts)
    return starts, np.diff(starts, append=stop)
