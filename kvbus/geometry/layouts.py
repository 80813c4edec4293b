"""Ready-made regions: a whole rank of an engine from the order of its axes.

Refuses nothing that memory can be: what it makes passes `validate_rank`. An engine whose memory is
different describes its regions itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    head_interval,
)

ALIGNMENT_BYTES = 4096

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
    engine: EngineSpec, rank: int, layout: KvLayout, *, num_blocks: int, segment_id: str = "kv"
) -> RankSpec:
    """The rank's regions one after the other in one segment, each of ``num_blocks`` blocks.

    A rank without a KV head of its own holds a replica of the one before its interval.
    """
    regions: list[Region] = []
    end = 0
    for group in engine.groups:
        for layers in _layers_of_regions(group, layout):
            heads = held_heads(rank, engine.tp_size, group.num_kv_heads)
            region = Region(
                segment_id=segment_id,
                offset_bytes=end,
                group=group.name,
                layers=layers,
                parts=group.parts,
                first_head=heads.start,
                num_heads=len(heads),
                axes=_packed_axes(
                    layout,
                    {
                        AxisName.BLOCK: num_blocks,
                        AxisName.LAYER: len(layers),
                        AxisName.KV: len(group.parts),
                        AxisName.TOKEN: group.block_size,
                        AxisName.HEAD: len(heads),
                        AxisName.DIM: group.head_dim,
                    },
                    DTYPE_SIZES_BYTES[group.dtype],
                ),
            )
            regions.append(region)
            size_bytes = region.stride_bytes(layout.axes[0]) * region.size(layout.axes[0])
            end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return RankSpec(rank=rank, segments=(Segment(segment_id, end),), regions=tuple(regions))


def held_heads(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """KV heads in a rank's memory: its interval, or a replica when that is empty."""
    first, stop = head_interval(rank, tp_size, num_kv_heads)
    return range(first, max(stop, first + 1))


def _layers_of_regions(group: GroupSpec, layout: KvLayout) -> Iterator[tuple[int, ...]]:
    if layout.cross_layer:
        yield group.layers
    else:
        yield from ((layer,) for layer in group.layers)


def _packed_axes(
    layout: KvLayout, sizes: Mapping[AxisName, int], itemsize: int
) -> tuple[Axis, ...]:
    """The layout's axes with the strides of a tensor without gaps."""
    axes: list[Axis] = []
    stride_bytes = itemsize
    for name in reversed(layout.axes):
        axes.insert(0, Axis(name, sizes[name], stride_bytes))
        stride_bytes *= sizes[name]
    return tuple(axes)
