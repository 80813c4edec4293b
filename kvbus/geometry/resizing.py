"""The memory of ranks with another number of blocks, each rank packed into one segment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvbus.errors import GeometryError
from kvbus.geometry.layouts import packed_like
from kvbus.geometry.spec import AxisName, EngineSpec, RankSpec, Region, Segment
from kvbus.geometry.validation import cells_of

ALIGNMENT_BYTES = 256
MAX_BLOCKS = 1 << 22
"""The limit of each group; lists of block ids stay small."""


@dataclass(frozen=True, slots=True)
class Space:
    """Groups that share block ids, as blocks of one id share bytes."""

    groups: tuple[str, ...]
    num_blocks: int
    block_bytes: int
    """Bytes of one block over all ranks."""


@dataclass(frozen=True, slots=True)
class ResizedRanks:
    ranks: tuple[RankSpec, ...]
    spaces: tuple[Space, ...]

    @property
    def size_bytes(self) -> int:
        return sum(rank.segments[0].size_bytes for rank in self.ranks)


# Blocks that are one cell keep their layout: the regions in the cell stay where they are in it.
# Other regions become block by block, with their axes in the same order:
#
#     cell     |k0 v0 gap|k1 v1 gap|k2 v2 gap|  ▶  |k0 v0 gap|k1 v1 gap|
#     others   |k0 k1 k2|v0 v1 v2|              ▶  |k0 k1|v0 v1|
#
# So the runs of a copy are those of a copy between two engines of the same layout.
def resize_ranks(engine: EngineSpec, ranks: Sequence[RankSpec], max_bytes: int) -> ResizedRanks:
    """Return ranks of up to ``max_bytes`` in all, with blocks in the proportion of ``ranks``.

    Raises `GeometryError` if a block of each group does not fit.
    """
    cells = {rank.rank: list(cells_of(engine, rank)) for rank in ranks}
    every = [cell for of_rank in cells.values() for cell in of_rank]
    before = [
        Space(groups, _num_blocks(every, groups), _block_bytes(engine, every, groups))
        for groups in _joined({region.group for region in cell} for cell in every)
    ]
    spare_bytes = max_bytes - ALIGNMENT_BYTES * len(every) - sum(one.block_bytes for one in before)
    if spare_bytes < 0:
        raise GeometryError(f"{max_bytes} bytes do not hold a block of each group", field="groups")
    whole_bytes = sum(one.num_blocks * one.block_bytes for one in before)
    spaces = [
        Space(
            one.groups,
            min(MAX_BLOCKS, 1 + one.num_blocks * spare_bytes // whole_bytes),
            one.block_bytes,
        )
        for one in before
    ]
    counts = {group: one.num_blocks for one in spaces for group in one.groups}
    resized = tuple(_resized(engine, rank, cells[rank.rank], counts) for rank in ranks)
    return ResizedRanks(resized, tuple(spaces))


def _resized(
    engine: EngineSpec, rank: RankSpec, cells: list[list[Region]], counts: Mapping[str, int]
) -> RankSpec:
    segment_id, regions, end = f"kv-{rank.rank}", dict[int, Region](), 0
    for cell in cells:
        first = cell[0]
        num_blocks, base = counts[first.group], min(one.offset_bytes for one in cell)
        for region in cell:
            at = end + region.offset_bytes - base
            regions[id(region)] = (
                _with_blocks(region, num_blocks, segment_id, at)
                if is_block_first(region)
                else packed_like(
                    engine.group(region.group),
                    region,
                    num_blocks=num_blocks,
                    segment_id=segment_id,
                    offset_bytes=at,
                )
            )
        end += -(-num_blocks * _cell_bytes(engine, cell) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    in_order = tuple(regions[id(region)] for region in rank.regions)
    return RankSpec(rank.rank, (Segment(segment_id, end),), in_order)


def is_block_first(region: Region) -> bool:
    """Return whether its blocks follow each other, none within another."""
    step = region.stride_bytes(AxisName.BLOCK)
    inner = (axis for axis in region.axes if axis.name is not AxisName.BLOCK)
    return sum((axis.size - 1) * axis.stride_bytes for axis in inner) < step


def _with_blocks(region: Region, num_blocks: int, segment_id: str, offset_bytes: int) -> Region:
    axes = tuple(
        msgspec.structs.replace(axis, size=num_blocks) if axis.name is AxisName.BLOCK else axis
        for axis in region.axes
    )
    return msgspec.structs.replace(
        region, segment_id=segment_id, offset_bytes=offset_bytes, axes=axes
    )


def _cell_bytes(engine: EngineSpec, cell: list[Region]) -> int:
    region = cell[0]
    if is_block_first(region):
        return region.stride_bytes(AxisName.BLOCK)
    group, parts = engine.group(region.group), len(region.layers) * len(region.parts)
    head_bytes = group.head_bytes(region.parts[0])
    return parts * region.num_heads * group.block_size * head_bytes


def _num_blocks(cells: Iterable[list[Region]], groups: tuple[str, ...]) -> int:
    held = (region for cell in cells for region in cell if region.group in groups)
    return min(region.size(AxisName.BLOCK) for region in held)


def _block_bytes(engine: EngineSpec, cells: Iterable[list[Region]], groups: tuple[str, ...]) -> int:
    return sum(_cell_bytes(engine, cell) for cell in cells if cell[0].group in groups)


def _joined(named: Iterable[set[str]]) -> list[tuple[str, ...]]:
    """Join sets that have a name in common."""
    joined: list[set[str]] = []
    for names in named:
        touched = [one for one in joined if one & names]
        joined = [one for one in joined if one not in touched]
        joined.append(names.union(*touched))
    return [tuple(sorted(one)) for one in joined]
