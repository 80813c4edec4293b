"""Ready-made regions: a whole rank from the order of its axes, and a staging slot."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from kvbus.errors import GeometryError
from kvbus.geometry.spec import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
    Tile,
)
from kvbus.geometry.validation import check_held

ALIGNMENT_BYTES = 4096

CANONICAL_AXES = (
    AxisName.LAYER,
    AxisName.KV,
    AxisName.BLOCK,
    AxisName.TOKEN,
    AxisName.HEAD,
    AxisName.DIM,
)

NAMED_ORDERS = {
    "NHD": (AxisName.KV, AxisName.TOKEN, AxisName.HEAD, AxisName.DIM),
    "HND": (AxisName.KV, AxisName.HEAD, AxisName.TOKEN, AxisName.DIM),
}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The order of a cache's axes, outermost first."""

    axes: tuple[AxisName, ...]

    def __post_init__(self) -> None:
        needed = set(AxisName) - {AxisName.LAYER}
        if set(self.axes) - {AxisName.LAYER} != needed or len(set(self.axes)) != len(self.axes):
            raise GeometryError(
                f"a layout names each of {', '.join(sorted(needed))} once, and perhaps layer",
                field="axes",
            )

    @property
    def cross_layer(self) -> bool:
        return AxisName.LAYER in self.axes

    @classmethod
    def parse(cls, text: str, *, cross_layer: bool = False) -> "KvLayout":
        """Parse ``NHD`` or ``HND`` (within a block), or all axes: ``block,kv,token,head,dim``.

        ``cross_layer`` adds a layer axis after the block axis. Raises `GeometryError`.
        """
        inner = NAMED_ORDERS.get(text)
        try:
            axes = (AxisName.BLOCK, *inner) if inner else tuple(map(AxisName, text.split(",")))
        except ValueError as error:
            raise GeometryError(
                f"layout '{text}' is not NHD, HND or a list of {', '.join(AxisName)}", field="axes"
            ) from error
        if cross_layer and AxisName.LAYER not in axes:
            after = axes.index(AxisName.BLOCK) + 1
            axes = (*axes[:after], AxisName.LAYER, *axes[after:])
        return cls(axes)


def lay_out_rank(
    engine: EngineSpec,
    rank: int,
    layout: KvLayout,
    *,
    num_blocks: int | Mapping[str, int],
    segment_id: str = "kv",
) -> RankSpec:
    """Lay out a rank's regions one after the other in one segment. Raises `GeometryError`."""
    regions: list[Region] = []
    end, stage = 0, held_layers(engine, rank)
    for group in engine.groups:
        held = tuple(layer for layer in group.layers if layer in stage)
        layers = [held] if layout.cross_layer and held else [(layer,) for layer in held]
        parts = [(part,) for part in group.parts] if group.state else [group.parts]
        for these, some in product(layers, parts):
            num_heads = group.part_shape(some[0]).num_heads
            heads = held_heads(rank % engine.tp_size, engine.tp_size, num_heads)
            region = _packed_region(
                group,
                Tile(group.name, these, some, heads.start, len(heads), 0, group.block_size),
                layout.axes,
                num_blocks=num_blocks if isinstance(num_blocks, int) else num_blocks[group.name],
                segment_id=segment_id,
                offset_bytes=end,
            )
            regions.append(region)
            size_bytes = region.axes[0].stride_bytes * region.axes[0].size
            end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not regions:
        raise GeometryError(
            f"rank {rank} holds no layer: {engine.pp_size} stages are more than there are layers",
            field="pp_size",
        )
    return RankSpec(rank=rank, segments=(Segment(segment_id, end),), regions=tuple(regions))


def held_heads(tp_rank: int, tp_size: int, num_kv_heads: int) -> range:
    """Return a rank's even share of the KV heads, or one replica if that is empty."""
    first, stop = (rank * num_kv_heads // tp_size for rank in (tp_rank, tp_rank + 1))
    return range(first, max(stop, first + 1))


def held_layers(engine: EngineSpec, rank: int) -> frozenset[int]:
    """Return the layers of the rank's pipeline stage."""
    layers = sorted({layer for group in engine.groups for layer in group.layers})
    stage = rank // engine.tp_size
    first, stop = (at * len(layers) // engine.pp_size for at in (stage, stage + 1))
    return frozenset(layers[first:stop])


def slot_region(group: GroupSpec, tile: Tile) -> Region:
    """Return a region that holds ``tile``, packed, as one block. Raises `GeometryError`."""
    check_held(group, tile, "tile")
    if tile.stop <= tile.start:
        raise GeometryError(f"tile has no positions: {tile.start} to {tile.stop}", field="stop")
    return _packed_region(group, tile, CANONICAL_AXES)


def staged_regions(
    group: GroupSpec, regions: Iterable[Region], held: Tile, *, num_blocks: int
) -> Iterator[Region]:
    """Yield packed regions, one after the other, for what ``held`` has of ``regions``."""
    end = 0
    for one in regions:
        layers = tuple(layer for layer in one.layers if layer in held.layers)
        parts = tuple(part for part in one.parts if part in held.parts)
        if one.group != held.group or not (layers and parts):
            continue
        block = Tile(
            group.name, layers, parts, held.first_head, held.num_heads, 0, group.block_size
        )
        yield (
            region := _packed_region(
                group, block, order_of(one), num_blocks=num_blocks, offset_bytes=end
            )
        )
        end += region.axes[0].size * region.axes[0].stride_bytes


def order_of(region: Region) -> tuple[AxisName, ...]:
    """Return all axes, outermost first; the only block is outermost."""
    names = sorted(AxisName, key=region.stride_bytes, reverse=True)
    if region.size(AxisName.BLOCK) == 1:
        names.sort(key=lambda name: name is not AxisName.BLOCK)
    return tuple(names)


def packed_like(
    group: GroupSpec, region: Region, *, num_blocks: int, segment_id: str, offset_bytes: int
) -> Region:
    """Return the region without gaps, with its axes in the same order."""
    heads = region.first_head, region.num_heads
    block = Tile(group.name, region.layers, region.parts, *heads, 0, group.block_size)
    return _packed_region(
        group,
        block,
        order_of(region),
        num_blocks=num_blocks,
        segment_id=segment_id,
        offset_bytes=offset_bytes,
    )


def slot_bytes(group: GroupSpec, tile: Tile) -> int:
    heads = len(tile.layers) * len(tile.parts) * tile.num_heads
    return (tile.stop - tile.start) * heads * group.head_bytes(tile.parts[0])


def _packed_region(
    group: GroupSpec,
    block: Tile,
    order: tuple[AxisName, ...],
    *,
    num_blocks: int = 1,
    segment_id: str = "slot",
    offset_bytes: int = 0,
) -> Region:
    sizes = {
        AxisName.BLOCK: num_blocks,
        AxisName.LAYER: len(block.layers),
        AxisName.KV: len(block.parts),
        AxisName.TOKEN: block.stop - block.start,
        AxisName.HEAD: block.num_heads,
        AxisName.DIM: group.part_shape(block.parts[0]).head_dim,
    }
    axes: list[Axis] = []
    stride_bytes = DTYPE_SIZES_BYTES[group.dtype]
    for name in reversed(order):
        axes.append(Axis(name, sizes[name], stride_bytes))
        stride_bytes *= sizes[name]
    return Region(
        segment_id=segment_id,
        offset_bytes=offset_bytes,
        group=group.name,
        layers=block.layers,
        parts=block.parts,
        first_head=block.first_head,
        num_heads=block.num_heads,
        axes=tuple(reversed(axes)),
    )
