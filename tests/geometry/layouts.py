"""Random but possible ranks: tensors of any axis order and padding, cut into regions.

Refuses to use strides other than through `byte_offset`, the plain meaning of a region.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import msgspec
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    KvPart,
    RankSpec,
    Region,
    Segment,
)

B, L, KV, T, H, D = AxisName  # block, layer, kv, token, head, dim
ORDERS = (
    (B, L, KV, T, H, D),  # NHD, cross-layer blocks
    (L, KV, B, T, H, D),  # NHD, K and V apart
    (L, B, KV, H, T, D),  # HND
    (L, B, T, H, KV, D),  # K and V side by side: the kv stride is head_dim * itemsize
    (L, B, H, D, T, KV),  # nothing as usual
)
Draw = st.DrawFn


@dataclass(frozen=True)
class Element:
    """Which number of the KV cache, wherever it lies."""

    block: int
    layer: int
    part: KvPart
    token: int
    head: int
    dim: int


def byte_offset(region: Region, element: Element) -> int:
    """Where ``element`` starts in the region's segment: the definition, index by index."""
    indices = {
        B: element.block,
        L: region.layers.index(element.layer),
        KV: region.parts.index(element.part),
        T: element.token,
        H: element.head - region.first_head,
        D: element.dim,
    }
    return region.offset_bytes + sum(indices[axis.name] * axis.stride_bytes for axis in region.axes)


def elements(region: Region, group: GroupSpec) -> Iterator[Element]:
    """Every element that the region holds."""
    yield from (
        Element(*indices)
        for indices in product(
            range(region.size(B)),
            region.layers,
            region.parts,
            range(group.block_size),
            range(region.first_head, region.first_head + region.num_heads),
            range(group.head_dim),
        )
    )


@st.composite
def group_specs(draw: Draw) -> tuple[GroupSpec, ...]:
    """One or two groups whose layers interleave."""
    layers = draw(st.permutations([0, 1, 2, 7]))
    cut = draw(st.integers(1, 3))
    shares = [layers[:cut]] if draw(st.booleans()) else [layers[:cut], layers[cut:]]
    return tuple(
        GroupSpec(
            name=f"group{number}",
            layers=tuple(share),
            block_size=draw(st.integers(1, 4)),
            num_kv_heads=draw(st.integers(1, 3)),
            head_dim=draw(st.integers(1, 3)),
            dtype=draw(st.sampled_from(sorted(DTYPE_SIZES_BYTES))),
            parts=draw(st.sampled_from([(KvPart.KEY, KvPart.VALUE), (KvPart.LATENT,)])),
        )
        for number, share in enumerate(shares)
    )


@st.composite
def engines(draw: Draw, groups: tuple[GroupSpec, ...], *, tp_size: int) -> EngineSpec:
    """An engine with these groups, but block sizes of its own."""
    sized = tuple(
        msgspec.structs.replace(group, block_size=draw(st.integers(1, 4))) for group in groups
    )
    return EngineSpec(engine_id="engine", model="model", tp_size=tp_size, groups=sized)


@st.composite
def ranks(draw: Draw, engine: EngineSpec, number: int, *, num_blocks: int) -> RankSpec:
    """A possible rank: each group as tensors in one of two segments, each tensor as regions."""
    ends = {"segment0": draw(st.integers(0, 8)), "segment1": 0}
    regions: list[Region] = []
    for group in engine.groups:
        first_head = draw(st.integers(0, group.num_kv_heads - 1))
        num_heads = draw(st.integers(1, group.num_kv_heads - first_head))
        for layers, parts in draw(_tensors(group)):
            shape = {B: num_blocks, L: len(layers), KV: len(parts)}
            shape |= {T: group.block_size, H: num_heads, D: group.head_dim}
            strides, num_bytes = draw(_strides(shape, DTYPE_SIZES_BYTES[group.dtype]))
            segment = draw(st.sampled_from(sorted(ends)))
            whole = Region(
                segment_id=segment,
                offset_bytes=ends[segment],
                group=group.name,
                layers=layers,
                parts=parts,
                first_head=first_head,
                num_heads=num_heads,
                axes=tuple(Axis(name, shape[name], strides[name]) for name in draw(_axis_order())),
            )
            ends[segment] += num_bytes + draw(st.sampled_from([0, 0, 5]))
            regions += draw(_cut(whole))
    segments = tuple(Segment(name, max(end, 1)) for name, end in ends.items())
    return RankSpec(rank=number, segments=segments, regions=tuple(draw(st.permutations(regions))))


@st.composite
def _tensors(draw: Draw, group: GroupSpec) -> list[tuple[tuple[int, ...], tuple[KvPart, ...]]]:
    layers = draw(st.permutations(group.layers))
    cut = draw(st.integers(0, len(layers)))
    chunks = [tuple(chunk) for chunk in (layers[:cut], layers[cut:]) if chunk]
    parts = tuple(draw(st.permutations(group.parts)))
    kinds = [parts] if draw(st.booleans()) else [(part,) for part in parts]
    return list(product(chunks, kinds))


def _axis_order() -> st.SearchStrategy[Sequence[AxisName]]:
    return st.one_of(st.sampled_from(ORDERS), st.permutations(list(AxisName)))


@st.composite
def _strides(
    draw: Draw, shape: dict[AxisName, int], itemsize: int
) -> tuple[dict[AxisName, int], int]:
    """Bytes per step of each axis, outermost first in the drawn order, some of them padded."""
    strides, extent = {}, itemsize
    padded = draw(st.sets(st.sampled_from(list(AxisName)), max_size=2))
    for name in reversed(draw(_axis_order())):
        strides[name] = extent + (itemsize if name in padded else 0)
        extent = shape[name] * strides[name]
    return strides, extent


@st.composite
def _cut(draw: Draw, whole: Region) -> list[Region]:
    """The tensor as one region, or as one for each layer, part or both, its strides as they are."""
    pieces = [whole]
    if draw(st.booleans()):
        pieces = [one for piece in pieces for one in _one_each(piece, L)]
    if draw(st.booleans()):
        pieces = [one for piece in pieces for one in _one_each(piece, KV)]
    return pieces


def _one_each(region: Region, name: AxisName) -> Iterator[Region]:
    """``region`` without axis ``name``, once for each index along it."""
    key = "layers" if name is L else "parts"
    for index, value in enumerate(getattr(region, key)):
        yield msgspec.structs.replace(
            region,
            **{key: (value,)},
            offset_bytes=region.offset_bytes + index * region.stride_bytes(name),
            axes=tuple(axis for axis in region.axes if axis.name is not name),
        )
