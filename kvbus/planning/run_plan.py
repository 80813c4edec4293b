"""Plans: which bytes of source ranks go to which bytes of target ranks.

Bytes are paired by position (token, layer, part, head), never by counting blocks. A unit is tokens
in one block on either side. The runs of a unit are computed once per length.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    BlockTable,
    EngineSpec,
    RankSpec,
    Region,
    Tile,
    slot_region,
)
from kvbus.planning.mapping import Cell, Share, cells
from kvbus.planning.runs import ZERO, Lattice, Offsets, Run, Runs
from kvbus.planning.spans import Spans, Tables

MAX_FEW = 32
"""Above this number of runs, arrays are faster."""

ENDLESS = 2**31 - 1
WHOLE_SLOT = BlockTable.of([0])


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A rank, and the address of each segment; without addresses, READs cannot use its blocks."""

    engine: EngineSpec
    rank: RankSpec
    addresses: Mapping[str, int]

    @property
    def direct(self) -> bool:
        return bool(self.addresses)


class RunPlan:
    """Raises `GeometryError` if a rank lacks content of a share."""

    def __init__(
        self,
        sources: Mapping[int, PlacedRank],
        targets: Mapping[int, PlacedRank],
        shares: Iterable[Share],
    ) -> None:
        corners: dict[_Form, list[tuple[int, int]]] = defaultdict(list)
        for share in shares:
            for form, pair in _pairs(sources[share.holder], targets[share.reader], share):
                corners[form].append(pair)
        self._bundles = [_Bundle(form, pairs) for form, pairs in corners.items()]

    def num_runs(self, spans: Spans) -> int:
        """Return about how many runs these are, before neighbours are merged."""
        return sum(one.num_runs(*spans[one.form.group]) for one in self._bundles)

    def runs(self, source_tables: Tables, target_tables: Tables, spans: Spans) -> Runs:
        """Raises `IndexError` if a table does not cover its positions."""
        few: list[Run] = []
        for one in self._bundles:
            start, stop = spans[one.form.group]
            if start < stop:
                tables = source_tables[one.form.group], target_tables[one.form.group]
                if not one.add_few(few, *tables, start, stop):
                    return self._many(source_tables, target_tables, spans)
        return Runs(few=tuple(few))

    def _many(self, source_tables: Tables, target_tables: Tables, spans: Spans) -> Runs:
        found: list[Lattice] = []
        for one in self._bundles:
            start, stop = spans[group := one.form.group]
            if start < stop:
                found += one.lattices(source_tables[group], target_tables[group], start, stop)
        return Runs(lattices=tuple(found))


# To the planner, a slot with n positions from p on is one block that never ends. So the slot cuts
# no unit, and position 0 lies p tokens in front of it. Plans depend on n, but not on p.
class SlotPlan:
    def __init__(self, placed: PlacedRank, tile: Tile, *, into_slot: bool) -> None:
        group = placed.engine.group(tile.group)
        region = slot_region(group, tile)
        endless = msgspec.structs.replace(group, block_size=ENDLESS)
        slot = PlacedRank(
            engine=msgspec.structs.replace(placed.engine, groups=(endless,)),
            rank=RankSpec(0, (), (region,)),
            addresses={region.segment_id: 0},
        )
        source, target = (placed, slot) if into_slot else (slot, placed)
        self._plan = RunPlan({0: source}, {0: target}, [Share.whole(tile)])
        self._group, self._into_slot = tile.group, into_slot
        self._token_bytes = region.stride_bytes(AxisName.TOKEN)

    def runs(self, table: BlockTable, start: int, stop: int, *, slot_at: int) -> Runs:
        first, there = slot_at - start * self._token_bytes, {self._group: WHOLE_SLOT}
        here, spans = {self._group: table}, {self._group: (start, stop)}
        if self._into_slot:
            return self._plan.runs(here, there, spans).moved(target_bytes=first)
        return self._plan.runs(there, here, spans).moved(source_bytes=first)


class _Side(NamedTuple):
    """``axes`` are the other axes, layer to dim: bytes from the first moved index to each."""

    block_bytes: int
    token_bytes: int
    block_size: int
    axes: tuple[tuple[int, ...] | range, ...]

    def offsets(self, table: BlockTable, positions: Offsets) -> Offsets:
        rows = positions // self.block_size - table.first_block
        if rows[0] < 0:
            raise IndexError(f"block table starts only at block {table.first_block}")
        blocks = table.array()[rows].astype(np.int64)
        return blocks * self.block_bytes + positions % self.block_size * self.token_bytes


class _Form(NamedTuple):
    group: str
    source: _Side
    target: _Side
    itemsize: int


class _Bundle:
    """A corner is the address of block 0, token 0 and the first layer, part, head and dim."""

    def __init__(self, form: _Form, corners: list[tuple[int, int]]) -> None:
        self.form = form
        self._corners = np.array(corners, dtype=np.int64).T
        self._sizes = {form.source.block_size, form.target.block_size}
        self._units: dict[int, tuple[Lattice, tuple[Run, ...]]] = {}

    def num_runs(self, start: int, stop: int) -> int:
        size = min(self._sizes)
        return -(-(stop - start) // size) * self._unit(size)[0].num_runs

    def add_few(
        self, runs: list[Run], source: BlockTable, target: BlockTable, start: int, stop: int
    ) -> bool:
        """Return False if ``runs`` exceeds `MAX_FEW`."""
        _, (from_block, from_token, from_size, _), (to_block, to_token, to_size, _), _ = self.form
        while start < stop:
            from_index, to_index = start % from_size, start % to_size
            end = min(stop, start - from_index + from_size, start - to_index + to_size)
            _, few = self._units.get(end - start) or self._unit(end - start)
            if not few or len(runs) + len(few) > MAX_FEW:
                return False
            from_bytes = source.block(start // from_size) * from_block + from_index * from_token
            to_bytes = target.block(start // to_size) * to_block + to_index * to_token
            for target_bytes, source_bytes, run_bytes in few:
                runs.append((to_bytes + target_bytes, from_bytes + source_bytes, run_bytes))
            start = end
        return True

    def lattices(
        self, source: BlockTable, target: BlockTable, start: int, stop: int
    ) -> Iterator[Lattice]:
        """Yield one lattice per unit length; targets ascend where the offsets nest."""
        starts = self._unit_starts(start, stop)
        units = np.empty((2, starts.size), np.int64)
        units[0] = self.form.source.offsets(source, starts)
        units[1] = self.form.target.offsets(target, starts)
        lengths = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1] = stop - starts[-1]
        for length in sorted(set(lengths.tolist())):
            is_alike = lengths == length
            alike = units if is_alike.all() else units[:, is_alike]
            in_order = alike.take(np.argsort(alike[1], kind="stable"), axis=1)
            yield replace(self._unit(length)[0], units=in_order)

    def _unit_starts(self, start: int, stop: int) -> Offsets:
        every = [np.arange(start - start % size, stop, size) for size in self._sizes]
        for some in every:
            some[0] = start
        return every[0] if len(every) == 1 else np.unique(np.concatenate(every))

    def _unit(self, num_tokens: int) -> tuple[Lattice, tuple[Run, ...]]:
        """An empty tuple if the runs are many.

        Outer steps leave a block of the target, inner ones do not.
        """
        found = self._units.get(num_tokens)
        if found is None:
            source, target = self.form.source, self.form.target
            tokens = [_steps(range(num_tokens), one.token_bytes) for one in (source, target)]
            pairs = (*zip(source.axes, target.axes, strict=True), tokens)
            axes = [np.array([*map(tuple, pair)]) for pair in pairs if len(pair[0]) > 1]
            inner: list[Offsets] = []
            outer: list[Offsets] = []
            run_bytes = self.form.itemsize
            for axis in sorted(axes, key=lambda one: int(one[1, 1])):
                if (axis == np.arange(axis.shape[1]) * run_bytes).all():  # continues the run
                    run_bytes *= axis.shape[1]
                else:
                    (outer if axis[1, 1] >= target.block_bytes else inner).insert(0, axis)
            corners = _sums([self._corners, *outer])
            corners = corners[:, np.argsort(corners[1], kind="stable")]
            unit = Lattice(outer=corners, units=ZERO, inner=_sums(inner), run_bytes=run_bytes)
            few = tuple(Runs(lattices=(unit,))) if unit.num_runs <= MAX_FEW else ()
            found = self._units[num_tokens] = unit, few
        return found


def _sums(axes: Iterable[Offsets]) -> Offsets:
    sums = ZERO
    for steps in axes:
        sums = (sums[:, :, None] + steps[:, None, :]).reshape(2, -1)
    return sums


def _pairs(
    source: PlacedRank, target: PlacedRank, share: Share
) -> Iterator[tuple[_Form, tuple[int, int]]]:
    there, here = _held(source, share), _held(target, share)
    wanted = set(share.layers)
    pairs = {(id(there[cell]), id(here[cell])): (there[cell], here[cell]) for cell in there}
    for remote, local in pairs.values():
        layers = [one for one in local.layers if one in wanted and one in remote.layers]
        parts = [one for one in local.parts if one in share.parts and one in remote.parts]
        from_corner, from_side = _side(source, remote, share, layers, parts)
        to_corner, to_side = _side(target, local, share, layers, parts)
        itemsize = DTYPE_SIZES_BYTES[target.engine.group(share.group).dtype]
        yield _Form(share.group, from_side, to_side, itemsize), (from_corner, to_corner)


def _held(placed: PlacedRank, share: Share) -> dict[Cell, Region]:
    of_group = (one for one in placed.rank.regions if one.group == share.group)
    regions = {cell: one for one in of_group for cell in cells(one)}
    found: dict[Cell, Region] = {}
    end = share.first_head + share.num_heads
    for cell in cells(share):
        region = regions.get(cell)
        first = stop = 0
        if region is not None:
            first, stop = region.first_head, region.first_head + region.num_heads
        if region is None or share.first_head < first or end > stop:
            raise GeometryError(
                f"this rank holds heads {first} to {stop} of {'/'.join(map(str, cell))}, "
                f"not {share.first_head} to {end}",
                field="first_head" if region else "layers",
            )
        found[cell] = region
    return found


def _side(
    placed: PlacedRank, region: Region, share: Share, layers: list[int], parts: list[str]
) -> tuple[int, _Side]:
    first_head = share.first_head - region.first_head
    indices: dict[AxisName, tuple[int, ...] | range] = {
        AxisName.LAYER: tuple(region.layers.index(layer) for layer in layers),
        AxisName.KV: tuple(region.parts.index(part) for part in parts),
        AxisName.HEAD: range(first_head, first_head + share.num_heads),
        AxisName.DIM: range(region.size(AxisName.DIM)),
    }
    strides = {name: region.stride_bytes(name) for name in indices}
    corner = placed.addresses[region.segment_id] + region.offset_bytes
    side = _Side(
        block_bytes=region.stride_bytes(AxisName.BLOCK),
        token_bytes=region.stride_bytes(AxisName.TOKEN),
        block_size=placed.engine.group(region.group).block_size,
        axes=tuple(_steps(at, strides[name]) for name, at in indices.items()),
    )
    return corner + sum(at[0] * strides[name] for name, at in indices.items()), side


def _steps(indices: tuple[int, ...] | range, stride_bytes: int) -> tuple[int, ...] | range:
    """A range hashes and compares fast at any length."""
    if isinstance(indices, range):
        return range(0, len(indices) * stride_bytes, stride_bytes) if stride_bytes else range(1)
    return tuple((index - indices[0]) * stride_bytes for index in indices)
