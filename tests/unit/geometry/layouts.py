"""Random but possible ranks: tensors of any axis order and padding, cut into regions."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
from hypothesis import strategies as st

from kvbus import geometry

B, L, KV, T, H, D = geometry.AxisName  # block, layer, kv, token, head, dim
ORDERS = (
    (B, L, KV, T, H, D),  # NHD, cross-layer blocks
    (L, KV, B, T, H, D),  # NHD, K and V apart
    (L, B, KV, H, T, D),  # HND
    (L, B, T, H, KV, D),  # K and V side by side: the kv stride is head_dim * itemsize
    (L, B, H, D, T, KV),  # nothing as usual
)
SEGMENTS = ("segment0", "segment1")
Draw = st.DrawFn


@dataclass(frozen=True)
class Element:
    """A number of the KV cache, wherever it lies."""

    block: int
    layer: int
    part: str
    token: int
    head: int
    dim: int


@dataclass(frozen=True)
class Style:
    """How one group lies in the memory of a rank.

    Tensors have the layers of ``layer_order`` before and after ``layer_cut``. ``nesting`` is the
    order in memory, outermost first, ``axes`` that in the description. ``padded`` axes step further
    than they need. Each index of ``cut`` axes is a region of its own.
    """

    layer_order: tuple[int, ...]
    layer_cut: int
    parts: tuple[str, ...]
    parts_apart: bool
    axes: tuple[geometry.AxisName, ...]
    nesting: tuple[geometry.AxisName, ...]
    padded: frozenset[geometry.AxisName]
    cut: tuple[geometry.AxisName, ...]
    segment: str
    gap_bytes: int


@dataclass(frozen=True)
class Holding:
    """Layers, and heads of each part, that a rank holds of one group."""

    layers: frozenset[int]
    heads: Mapping[str, range]


def byte_offset(region: geometry.Region, element: Element) -> int:
    """The offset of ``element`` in the region's segment: the definition, index by index."""
    indices = {
        B: element.block,
        L: region.layers.index(element.layer),
        KV: region.parts.index(element.part),
        T: element.token,
        H: element.head - region.first_head,
        D: element.dim,
    }
    return region.offset_bytes + sum(indices[axis.name] * axis.stride_bytes for axis in region.axes)


@st.composite
def styles_of(draw: Draw, groups: Sequence[geometry.GroupSpec]) -> dict[str, Style]:
    styles = {}
    for group in groups:
        apart = bool(group.state) or draw(st.booleans())
        styles[group.name] = Style(
            layer_order=tuple(draw(st.permutations(group.layers))),
            layer_cut=draw(st.integers(0, len(group.layers))),
            parts=tuple(draw(st.permutations(group.parts))),
            parts_apart=apart,
            axes=tuple(draw(_axis_orders)),
            nesting=tuple(draw(_axis_orders)),
            padded=draw(st.frozensets(st.sampled_from(list(geometry.AxisName)), max_size=2)),
            cut=draw(st.sampled_from([(), (L,), (KV,), (L, KV)])),
            segment=draw(st.sampled_from(SEGMENTS)),
            gap_bytes=draw(st.sampled_from([0, 0, 5])),
        )
    return styles


def rank_of(
    engine: geometry.EngineSpec,
    number: int,
    *,
    styles: Mapping[str, Style],
    holding: Mapping[str, Holding],
    num_blocks: Mapping[str, int],
) -> geometry.RankSpec:
    """The rank with exactly ``holding``, each group in its style."""
    ends = dict.fromkeys(SEGMENTS, 0)
    regions: list[geometry.Region] = []
    for group in engine.groups:
        style, held = styles[group.name], holding[group.name]
        for layers, parts in _tensors(style, held.layers):
            shape = {
                B: num_blocks[group.name],
                L: len(layers),
                KV: len(parts),
                T: group.block_size,
                H: len(held.heads[parts[0]]),
                D: group.part_shape(parts[0]).head_dim,
            }
            axes, size_bytes = _axes(style, shape, geometry.DTYPE_SIZES_BYTES[group.dtype])
            first_head = held.heads[parts[0]].start
            at = ends[style.segment] + style.gap_bytes
            whole = geometry.Region(
                style.segment, at, group.name, layers, parts, first_head, shape[H], axes
            )
            regions += _cut(whole, style.cut)
            ends[style.segment] = at + size_bytes
    segments = tuple(geometry.Segment(name, max(end, 1)) for name, end in ends.items())
    return geometry.RankSpec(rank=number, segments=segments, regions=tuple(regions))


def _tensors(style: Style, held: Set[int]) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    chunks = style.layer_order[: style.layer_cut], style.layer_order[style.layer_cut :]
    kinds = [(part,) for part in style.parts] if style.parts_apart else [style.parts]
    for chunk in chunks:
        layers = tuple(layer for layer in chunk if layer in held)
        yield from ((layers, kind) for kind in kinds if layers)


def _axes(
    style: Style, shape: Mapping[geometry.AxisName, int], itemsize: int
) -> tuple[tuple[geometry.Axis, ...], int]:
    strides, extent = {}, itemsize
    for name in reversed(style.nesting):
        strides[name] = extent + (itemsize if name in style.padded else 0)
        extent = shape[name] * strides[name]
    return tuple(geometry.Axis(name, shape[name], strides[name]) for name in style.axes), extent


_axis_orders: st.SearchStrategy[Sequence[geometry.AxisName]] = st.one_of(
    st.sampled_from(ORDERS), st.permutations(list(geometry.AxisName))
)


def _cut(whole: geometry.Region, names: Sequence[geometry.AxisName]) -> list[geometry.Region]:
    """The tensor as one region for each layer, part or both."""
    pieces = [whole]
    for name in names:
        pieces = [one for piece in pieces for one in _one_each(piece, name)]
    return pieces


def _one_each(region: geometry.Region, name: geometry.AxisName) -> Iterator[geometry.Region]:
    """``region`` without axis ``name``, once for each index along it."""
    key = "layers" if name is L else "parts"
    for index, value in enumerate(getattr(region, key)):
        yield msgspec.structs.replace(
            region,
            **{key: (value,)},
            offset_bytes=region.offset_bytes + index * region.stride_bytes(name),
            axes=tuple(axis for axis in region.axes if axis.name is not name),
        )
