"""Ready-made regions: a whole rank of an engine from the order of its axes, and a staging slot.

An engine whose memory is different describes its regions itself. A slot holds one box, what one
packed transfer carries: a region at offset 0 of one block, without gaps, in the canonical order
``[layer, kv, token, head, dim]``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvbus.errors import GeometryError
from kvbus.geometry.spec import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    Count,
    EngineSpec,
    GroupSpec,
    Index,
    Name,
    RankSpec,
    Region,
    Segment,
)

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
    """The order of a cache's axes, outermost first; with the layer axis, one region has all layers.

    Without it (per-layer) each layer has a region of its own.
    """

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
        """Whether the layers lie in one region."""
        return AxisName.LAYER in self.axes

    @classmethod
    def parse(cls, text: str, *, cross_layer: bool = False) -> "KvLayout":
        """``NHD`` or ``HND`` (the order within a block), or all axes: ``block,kv,token,head,dim``.

        ``cross_layer`` puts the layer axis behind the block axis, unless ``text`` has one already.
        """
        inner = NAMED_ORDERS.get(text)
        try:
            axes = (AxisName.BLOCK, *inner) if inner else tuple(map(AxisName, text.split(",")))
        except ValueError as error:
            raise GeometryError(f"layout '{text}': {error}", field="axes") from error
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
    """The rank's regions one after the other in one segment.

    ``num_blocks`` is that of every group, or by group. The rank holds the layers of its pipeline
    stage, split evenly, and its interval of KV heads, or a replica of one when that is empty.
    Raises `GeometryError` for a stage without a layer.
    """
    regions: list[Region] = []
    end = 0
    for group, layers, parts in _tensors(engine, rank, layout):
        num_heads = group.part_shape(parts[0]).num_heads
        heads = held_heads(rank % engine.tp_size, engine.tp_size, num_heads)
        region = packed_region(
            group,
            layout.axes,
            layers,
            parts,
            heads,
            num_blocks=num_blocks if isinstance(num_blocks, int) else num_blocks[group.name],
            block_size=group.block_size,
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
    """Global KV heads in a rank's memory: its even share, or a replica of one when that is none."""
    first, stop = (rank * num_kv_heads // tp_size for rank in (tp_rank, tp_rank + 1))
    return range(first, max(stop, first + 1))


def held_layers(engine: EngineSpec, rank: int) -> frozenset[int]:
    """The layers of a rank's pipeline stage when all layers are split evenly, by number."""
    layers = sorted({layer for group in engine.groups for layer in group.layers})
    stage = rank // engine.tp_size
    first, stop = (at * len(layers) // engine.pp_size for at in (stage, stage + 1))
    return frozenset(layers[first:stop])


def packed_region(
    group: GroupSpec,
    order: tuple[AxisName, ...],
    layers: tuple[int, ...],
    parts: tuple[str, ...],
    heads: range,
    *,
    num_blocks: int,
    block_size: int,
    segment_id: str,
    offset_bytes: int = 0,
) -> Region:
    """A region without gaps, its axes in this order, outermost first."""
    sizes = {
        AxisName.BLOCK: num_blocks,
        AxisName.LAYER: len(layers),
        AxisName.KV: len(parts),
        AxisName.TOKEN: block_size,
        AxisName.HEAD: len(heads),
        AxisName.DIM: group.part_shape(parts[0]).head_dim,
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
        layers=layers,
        parts=parts,
        first_head=heads.start,
        num_heads=len(heads),
        axes=tuple(reversed(axes)),
    )


def _tensors(
    engine: EngineSpec, rank: int, layout: KvLayout
) -> Iterator[tuple[GroupSpec, tuple[int, ...], tuple[str, ...]]]:
    """Layers and parts of each region; those of a state have one each, as their shapes differ."""
    held = held_layers(engine, rank)
    for group in engine.groups:
        layers = tuple(layer for layer in group.layers if layer in held)
        parts = [(part,) for part in group.parts] if group.state else [group.parts]
        if not layers:
            continue
        for together in [layers] if layout.cross_layer else [(layer,) for layer in layers]:
            yield from ((group, together, one) for one in parts)


class Box(msgspec.Struct, frozen=True):
    """Layers x parts x positions [``start``, ``stop``) x heads of one group; see
    [Packed reads](#packed-reads). Positions are those of the group's block table; for all but a
    state these are tokens.
    """

    group: Name
    """The group."""
    layers: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=4096)]
    """Layers of the group, none twice; the order is that along the layer axis."""
    parts: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    """Parts of the group with heads of one size, none twice; the order is that along the kv
    axis."""
    first_head: Index
    """First global KV head, or unit."""
    num_heads: Count
    """Number of heads, or units."""
    start: Index
    """First position of the block table."""
    stop: Index
    """One past the last position; over ``start``."""


def slot_region(group: GroupSpec, box: Box) -> Region:
    """Where each element of ``box`` lies in its slot: all of its positions are in block 0.

    ``group`` is either side's. Raises `GeometryError` for a box that is none of the group.
    """
    _check_box(group, box)
    return packed_region(
        group,
        CANONICAL_AXES,
        box.layers,
        box.parts,
        range(box.first_head, box.first_head + box.num_heads),
        num_blocks=1,
        block_size=box.stop - box.start,
        segment_id="slot",
    )


def slot_bytes(group: GroupSpec, box: Box) -> int:
    """Bytes of the slot that `slot_region` describes."""
    heads = len(box.layers) * len(box.parts) * box.num_heads
    return (box.stop - box.start) * heads * group.head_bytes(box.parts[0])


def _check_box(group: GroupSpec, box: Box) -> None:
    lacking = {*box.layers, *box.parts} - {*group.layers, *group.parts}
    if lacking:
        names = ", ".join(sorted(map(str, lacking)))
        raise GeometryError(
            f"box has layers or parts that group '{group.name}' has not: {names}", field="layers"
        )
    if len(set(box.layers)) != len(box.layers) or len(set(box.parts)) != len(box.parts):
        raise GeometryError("box names a layer or a part twice", field="layers")
    shapes = [group.part_shape(part) for part in box.parts]
    if len({shape.head_dim for shape in shapes}) != 1:
        raise GeometryError(
            "parts whose heads differ in size need boxes of their own", field="parts"
        )
    num_heads = min(shape.num_heads for shape in shapes)
    if box.first_head + box.num_heads > num_heads:
        raise GeometryError(
            f"box has heads {box.first_head} to {box.first_head + box.num_heads} of {num_heads}",
            field="num_heads",
        )
    if box.stop <= box.start:
        raise GeometryError(f"box has no positions: {box.start} to {box.stop}", field="stop")
