"""The one answer to "which bytes of this rank are these tokens": plans between source and target.

Bytes are paired by position (token, layer, part, head), never by counting blocks. So any block
sizes and strides give the right pairs; what differs is only how long the contiguous runs are. All
blocks of a region are alike, so the runs of one unit, tokens in one block on either side, are found
once and hold for every unit of that length.

READs, mapped copies, packing, unpacking and zeroing are all runs of a plan: a staging slot is to it
a rank with one region at address 0. Arrays of offsets have the shape (2, n): row 0 is the source.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

import msgspec
import numpy as np

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    Box,
    EngineSpec,
    RankSpec,
    Region,
    Segment,
    slot_bytes,
    slot_region,
)
from kvbus.planning.mapping import Share
from kvbus.planning.runs import Lattice, Offsets, Run, Runs
from kvbus.planning.spans import Spans, Tables

MAX_FEW = 32
"""Runs that are found one by one; from there on arrays are faster."""

ENDLESS = 2**31 - 1
WHOLE_SLOT = BlockTable.of([0])


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A rank of an engine, and the address at which its agent has mapped each segment.

    Without addresses it is unregistered: no READ can start or end in its blocks.
    """

    engine: EngineSpec
    rank: RankSpec
    addresses: Mapping[str, int]

    @property
    def direct(self) -> bool:
        """Whether READs can start or end in its blocks."""
        return bool(self.addresses)


class RunPlan:
    """What ``shares`` move from source ranks to target ranks, both given by number.

    Made once, as shapes are constant; `runs` is called for each fetch. Raises `GeometryError` when
    a rank does not hold what a share names.
    """

    def __init__(
        self,
        sources: Mapping[int, PlacedRank],
        targets: Mapping[int, PlacedRank],
        shares: Iterable[Share],
    ) -> None:
        corners: dict[_Form, list[tuple[int, int]]] = defaultdict(list)
        for share in shares:
            source, target = sources[share.holder], targets[share.reader]
            for form, at in _pairs(source, target, share):
                corners[form].append(at)
        self._bundles = [_Bundle(form, at) for form, at in corners.items()]

    def num_runs(self, spans: Spans) -> int:
        """About how many runs these positions are, before neighbours are merged."""
        return sum(one.num_runs(*spans[one.group]) for one in self._bundles)

    def runs(
        self,
        source_tables: Tables,
        target_tables: Tables,
        spans: Spans,
        *,
        source_at: int = 0,
        target_at: int = 0,
    ) -> Runs:
        """The runs of the positions in ``spans``, each of them once.

        Both sides' tables must cover the positions; raises `IndexError` when one does not. A group
        without positions needs no tables. ``source_at`` and ``target_at`` are added to addresses.
        """
        few: list[Run] = []
        for one in self._bundles:
            start, stop = spans[one.group]
            if start >= stop:
                continue
            tables = source_tables[one.group], target_tables[one.group]
            if not one.add_few(few, *tables, start, stop):
                return self._many(source_tables, target_tables, spans, (source_at, target_at))
        if source_at or target_at:
            few = [(to + target_at, out_of + source_at, size) for to, out_of, size in few]
        return Runs(few=tuple(few))

    def _many(
        self, source_tables: Tables, target_tables: Tables, spans: Spans, at: tuple[int, int]
    ) -> Runs:
        moved = np.array(at, dtype=np.int64)[:, None]
        lattices = (
            one.lattices(moved, source_tables[one.group], target_tables[one.group], start, stop)
            for one in self._bundles
            for start, stop in (spans[one.group],)
            if start < stop
        )
        return Runs(lattices=tuple(chain.from_iterable(lattices)))


# A box of n positions from p on is, to the planner, all that a rank has of these positions in one
# block that never ends. So no unit is cut for the slot's sake, and the address of position 0 is so
# many tokens in front of the slot. Plans depend on n, but not on p.
class SlotPlan:
    """The runs between a rank's blocks and slots that hold a box of one shape.

    Raises `GeometryError` for a layer, part or head that the rank does not hold.
    """

    def __init__(self, placed: PlacedRank, box: Box, *, into_slot: bool) -> None:
        _check_held(placed.rank, box)
        group = placed.engine.group(box.group)
        region = slot_region(group, box)
        endless = msgspec.structs.replace(group, block_size=ENDLESS)
        slot = PlacedRank(
            engine=msgspec.structs.replace(placed.engine, groups=(endless,)),
            rank=RankSpec(0, (Segment(region.segment_id, slot_bytes(group, box)),), (region,)),
            addresses={region.segment_id: 0},
        )
        share = Share(
            holder=0,
            reader=0,
            group=box.group,
            layers=box.layers,
            parts=box.parts,
            first_head=box.first_head,
            num_heads=box.num_heads,
        )
        source, target = (placed, slot) if into_slot else (slot, placed)
        self._plan = RunPlan({0: source}, {0: target}, [share])
        self._group, self._into_slot = box.group, into_slot
        self._token_bytes = region.stride_bytes(AxisName.TOKEN)

    def runs(self, table: BlockTable, start: int, stop: int, *, slot_at: int) -> Runs:
        """The runs of positions [start, stop); the slot's first byte is at ``slot_at``."""
        tables = {self._group: table}, {self._group: WHOLE_SLOT}
        source, target = tables if self._into_slot else reversed(tables)
        moved = {
            "target_at" if self._into_slot else "source_at": slot_at - start * self._token_bytes
        }
        return self._plan.runs(source, target, {self._group: (start, stop)}, **moved)


def _check_held(rank: RankSpec, box: Box) -> None:
    held = {
        (layer, part): region
        for region in rank.regions
        if region.group == box.group
        for layer, part in product(region.layers, region.parts)
    }
    end = box.first_head + box.num_heads
    for layer, part in product(box.layers, box.parts):
        region = held.get((layer, part))
        first = stop = 0
        if region is not None:
            first, stop = region.first_head, region.first_head + region.num_heads
        if box.first_head < first or end > stop:
            raise GeometryError(
                f"this rank holds heads {first} to {stop} of layer {layer}, '{part}', of group "
                f"'{box.group}', not {box.first_head} to {end}",
                field="first_head" if region else "layers",
            )


class _Strides(NamedTuple):
    """Bytes from block to block and from token to token, and tokens in a block, on one side."""

    block_bytes: int
    token_bytes: int
    block_size: int

    def offset(self, table: BlockTable, position: int) -> int:
        """Of a position, from block 0 on; raises `IndexError` when the table lacks it."""
        block, within = divmod(position, self.block_size)
        return table.block(block) * self.block_bytes + within * self.token_bytes

    def offsets(self, table: BlockTable, positions: Offsets) -> Offsets:
        """The same of many, which ascend."""
        rows = positions // self.block_size - table.first_block
        if rows[0] < 0:
            raise IndexError(f"block table starts only at block {table.first_block}")
        blocks = table.array()[rows].astype(np.int64)
        return blocks * self.block_bytes + positions % self.block_size * self.token_bytes


class _Steps(NamedTuple):
    """Bytes from the first index of one axis to each, on either side; those of targets ascend."""

    source: tuple[int, ...]
    target: tuple[int, ...]


class _Form(NamedTuple):
    """What pairs of regions have in common when they differ only in where they lie."""

    group: str
    source: _Strides
    target: _Strides
    axes: tuple[_Steps, ...]
    itemsize: int


class _Pattern(NamedTuple):
    """The runs of one unit, each at a sum of one ``outer`` and one ``inner`` offset.

    Outer steps go past a block of the target, inner ones stay within it. ``few`` are these sums, of
    source and target; empty when they are many.
    """

    outer: Offsets
    inner: Offsets
    run_bytes: int
    few: tuple[tuple[int, int], ...] = ()

    @property
    def num_runs(self) -> int:
        """Runs of the unit."""
        return int(self.outer.shape[1] * self.inner.shape[1])


class _Bundle:
    """Pairs of regions of one form: one pattern of runs serves them all.

    A corner is the address of block 0, token 0 and the first layer, part, head and dim.
    """

    def __init__(self, form: _Form, corners: list[tuple[int, int]]) -> None:
        self.group = form.group
        self._form = form
        self._corners = np.array(corners, dtype=np.int64).T
        self._sizes = {form.source.block_size, form.target.block_size}
        self._patterns: dict[int, _Pattern] = {}

    def num_runs(self, start: int, stop: int) -> int:
        """Runs of so many tokens that start a block."""
        size = min(self._sizes)
        return -(-(stop - start) // size) * self._pattern(size).num_runs

    def add_few(
        self, runs: list[Run], source: BlockTable, target: BlockTable, start: int, stop: int
    ) -> bool:
        """Add the runs of positions [start, stop), or return False when all are many."""
        form = self._form
        there, here = form.source.block_size, form.target.block_size
        while start < stop:
            end = min(stop, start - start % there + there, start - start % here + here)
            pattern = self._pattern(end - start)
            if not pattern.few or len(runs) + len(pattern.few) > MAX_FEW:
                return False
            out_of, to = form.source.offset(source, start), form.target.offset(target, start)
            runs += [(to + b, out_of + a, pattern.run_bytes) for a, b in pattern.few]
            start = end
        return True

    def lattices(
        self, moved: Offsets, source: BlockTable, target: BlockTable, start: int, stop: int
    ) -> Iterator[Lattice]:
        """The runs of positions [start, stop), a lattice for each length of a unit.

        Targets ascend where the offsets nest.
        """
        ends = [np.arange(start - start % size + size, stop, size) for size in self._sizes]
        starts = np.concatenate([np.array([start], dtype=np.int64), *ends])
        if len(ends) > 1:
            starts = np.unique(starts)
        lengths = np.diff(starts, append=stop)
        form = self._form
        units = np.stack([form.source.offsets(source, starts), form.target.offsets(target, starts)])
        for length in np.unique(lengths).tolist():
            alike = units[:, lengths == length]
            order = np.argsort(alike[1], kind="stable")
            found = self._pattern(length)
            yield Lattice(found.outer + moved, alike[:, order], found.inner, found.run_bytes)

    def _pattern(self, num_tokens: int) -> _Pattern:
        """Over all pairs; kept, as there are no more patterns than tokens in a block."""
        found = self._patterns.get(num_tokens)
        if found is None:
            pattern = _pattern_of(self._form, num_tokens)
            outer = (self._corners[:, :, None] + pattern.outer[:, None, :]).reshape(2, -1)
            found = pattern._replace(outer=outer[:, np.argsort(outer[1], kind="stable")])
            if found.num_runs <= MAX_FEW:
                sums = (found.outer[:, :, None] + found.inner[:, None, :]).reshape(2, -1)
                found = found._replace(few=tuple((a, b) for a, b in sums.T.tolist()))
            self._patterns[num_tokens] = found
        return found


def _pattern_of(form: _Form, num_tokens: int) -> _Pattern:
    """The runs of a unit of ``num_tokens`` tokens, from its corner on."""
    token = _Steps(
        _strided(range(num_tokens), form.source.token_bytes),
        _strided(range(num_tokens), form.target.token_bytes),
    )
    axes = [axis for axis in (*form.axes, token) if len(axis.target) > 1]
    run_bytes = form.itemsize
    while (inner := _next_contiguous(axes, run_bytes)) is not None:
        run_bytes *= len(inner.target)
        axes.remove(inner)
    axes.sort(key=lambda axis: axis.target[1], reverse=True)
    num_outer = sum(axis.target[1] >= form.target.block_bytes for axis in axes)
    return _Pattern(_sums(axes[:num_outer]), _sums(axes[num_outer:]), run_bytes)


def _next_contiguous(axes: Iterable[_Steps], run_bytes: int) -> _Steps | None:
    """The axis that continues a run of ``run_bytes`` without a gap on both sides, if any does."""
    for axis in axes:
        if axis.source == axis.target == _strided(range(len(axis.target)), run_bytes):
            return axis
    return None


def _sums(axes: Iterable[_Steps]) -> Offsets:
    """Every sum of one step of each axis; the first axis is the outermost."""
    sums = np.zeros((2, 1), dtype=np.int64)
    for axis in axes:
        steps = np.array(axis, dtype=np.int64)
        sums = (sums[:, :, None] + steps[:, None, :]).reshape(2, -1)
    return sums


def _pairs(
    source: PlacedRank, target: PlacedRank, share: Share
) -> Iterator[tuple[_Form, tuple[int, int]]]:
    """Every pair of regions that has bytes of ``share`` in common: its form and its corners."""
    by_layer: dict[int, list[Region]] = defaultdict(list)
    for region in source.rank.regions:
        if region.group == share.group:
            for layer in region.layers:
                by_layer[layer].append(region)
    for local in target.rank.regions:
        if local.group == share.group:
            found = {id(region): region for layer in local.layers for region in by_layer[layer]}
            for remote in found.values():
                yield from _pair(source, remote, target, local, share)


def _pair(
    source: PlacedRank, remote: Region, target: PlacedRank, local: Region, share: Share
) -> Iterator[tuple[_Form, tuple[int, int]]]:
    wanted = set(share.layers)
    layers = [layer for layer in local.layers if layer in wanted and layer in remote.layers]
    parts = [part for part in local.parts if part in share.parts and part in remote.parts]
    if not (layers and parts):
        return
    corners, steps = [], []
    for placed, region in ((source, remote), (target, local)):
        first_head = share.first_head - region.first_head
        indices: dict[AxisName, range | tuple[int, ...]] = {
            AxisName.DIM: range(region.size(AxisName.DIM)),
            AxisName.HEAD: range(first_head, first_head + share.num_heads),
            AxisName.KV: tuple(region.parts.index(part) for part in parts),
            AxisName.LAYER: tuple(region.layers.index(layer) for layer in layers),
        }
        offsets = [_from_first(at, region.stride_bytes(axis)) for axis, at in indices.items()]
        base = placed.addresses[region.segment_id] + region.offset_bytes
        corners.append(base + sum(first for first, _ in offsets))
        steps.append([further for _, further in offsets])
    form = _Form(
        group=local.group,
        source=_strides(source.engine, remote),
        target=_strides(target.engine, local),
        axes=tuple(map(_Steps, *steps)),
        itemsize=DTYPE_SIZES_BYTES[target.engine.group(local.group).dtype],
    )
    yield form, (corners[0], corners[1])


def _strides(engine: EngineSpec, region: Region) -> _Strides:
    return _Strides(
        block_bytes=region.stride_bytes(AxisName.BLOCK),
        token_bytes=region.stride_bytes(AxisName.TOKEN),
        block_size=engine.group(region.group).block_size,
    )


@lru_cache(1 << 12)
def _from_first(indices: range | tuple[int, ...], stride_bytes: int) -> tuple[int, tuple[int, ...]]:
    """The offset of the first index, and those of all from there; regions are alike, so cached."""
    offsets = _strided(indices, stride_bytes)
    return offsets[0], tuple(offset - offsets[0] for offset in offsets)


def _strided(indices: Iterable[int], stride_bytes: int) -> tuple[int, ...]:
    return tuple(index * stride_bytes for index in indices)
