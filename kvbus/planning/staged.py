"""Staged reads: whole blocks are READ into a slot here, and copied to the readers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kvbus.geometry import BlockTable, RankSpec, num_blocks_for, staged_regions
from kvbus.planning.mapping import Share, position_bytes
from kvbus.planning.run_plan import PlacedRank, RunPlan
from kvbus.planning.runs import Runs
from kvbus.planning.spans import Span, Spans, Tables
from kvbus.planning.tiles import evenly


# Short runs of the readers' blocks may be long ones at the holder. This is so if axes have another
# order, or if a block has the heads of several ranks here. To the planner, the slot is a rank of
# the holder's engine, with the holder's blocks in their order and without gaps:
#
#     holder's blocks ──READ, long runs──▶ slot ──copy, short runs──▶ blocks of each reader
class StagedPlan:
    """The plan of one holder's ``layers`` for ``shares`` that differ only in readers and heads."""

    def __init__(
        self,
        holder: PlacedRank,
        readers: Mapping[int, PlacedRank],
        shares: Iterable[Share],
        *,
        layers: tuple[int, ...],
        slot_bytes: int,
    ) -> None:
        wanted = [replace(one, holder=0, layers=layers) for one in shares]
        num_heads = _end(wanted) - wanted[0].first_head
        whole = replace(wanted[0], reader=0, num_heads=num_heads, others=())
        self.group = whole.group
        group = holder.engine.group(whole.group)
        self._block_size = group.block_size
        self._block_bytes = position_bytes(whole, group) * group.block_size
        regions = staged_regions(
            group,
            holder.rank.regions,
            whole.tile(layers, 0, group.block_size),
            num_blocks=slot_bytes // self._block_bytes,
        )
        slot = PlacedRank(holder.engine, RankSpec(0, (), tuple(regions)), {"slot": 0})
        copied = [replace(one, reader=n, others=()) for one in wanted for n in one.readers]
        self._read = RunPlan({0: holder}, {0: slot}, [whole])
        self._copy = RunPlan({0: slot}, readers, copied)

    def num_runs(self, spans: Spans) -> int:
        return self._read.num_runs({self.group: spans[self.group]})

    def tiles(self, span: Span, *, tile_bytes: int) -> Iterator[Span]:
        start, stop = span
        if start < stop:
            first, end = start // self._block_size, num_blocks_for(stop, self._block_size)
            num_tiles = -(-(end - first) // max(1, tile_bytes // self._block_bytes))
            for lo, hi in evenly(first, end, num_tiles):
                yield max(start, lo * self._block_size), min(stop, hi * self._block_size)

    def reads(self, tables: Tables, tile: Span, *, slot_at: int) -> Runs:
        """Raises `IndexError` if ``tables`` do not cover the positions."""
        runs = self._read.runs(tables, self._in_slot(tile), {self.group: tile})
        return runs.moved(target_bytes=slot_at)

    def copies(self, tables: Tables, tile: Span, *, slot_at: int) -> Runs:
        runs = self._copy.runs(self._in_slot(tile), tables, {self.group: tile})
        return runs.moved(source_bytes=slot_at)

    def _in_slot(self, tile: Span) -> Tables:
        first, end = tile[0] // self._block_size, num_blocks_for(tile[1], self._block_size)
        return {self.group: BlockTable.of(range(end - first), first_block=first)}


def staged_plans(
    holders: Mapping[int, PlacedRank],
    readers: Mapping[int, PlacedRank],
    shares: Iterable[Share],
    *,
    slot_bytes: int,
) -> tuple[StagedPlan, ...]:
    """None if a slot cannot hold one layer's block.

    Shares whose heads are neighbours at one holder are read together.
    """
    beside: list[list[Share]] = []
    for one in sorted(shares, key=lambda one: (*_alike(one), one.first_head)):
        before = beside[-1][-1] if beside else None
        if before and _alike(before) == _alike(one) and _end(beside[-1]) >= one.first_head:
            beside[-1].append(one)
        else:
            beside.append([one])
    plans: list[StagedPlan] = []
    for some in beside:
        holder, layers = holders[some[0].holder], some[0].layers
        group, first_head = holder.engine.group(some[0].group), some[0].first_head
        heads = replace(some[0], layers=layers[:1], num_heads=_end(some) - first_head)
        together = slot_bytes // (position_bytes(heads, group) * group.block_size)
        if not together:
            return ()
        for at in range(0, len(layers), together):
            some_layers = layers[at : at + together]
            plans.append(
                StagedPlan(holder, readers, some, layers=some_layers, slot_bytes=slot_bytes)
            )
    return tuple(plans)


def _alike(share: Share) -> tuple[int, str, tuple[int, ...], tuple[str, ...]]:
    return share.holder, share.group, share.layers, share.parts


def _end(shares: Iterable[Share]) -> int:
    return max(one.first_head + one.num_heads for one in shares)
