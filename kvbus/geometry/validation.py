"""Says whether a spec can describe real memory, before any byte moves.

Refuses specs that contradict themselves, regions that overlap or leave their segment, and ranks
that hold a layer twice or not at all; each refusal is a `GeometryError` that names the field.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby, product
from operator import attrgetter
from typing import NamedTuple

from kvbus.errors import GeometryError
from kvbus.geometry.spec import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    state_group,
)

MAX_COMPARED_SPANS = 1 << 13
"""Some 10 ms. A rank whose regions interleave regularly needs one for each region and axis."""


def validate_engine(spec: EngineSpec) -> None:
    """Raise `GeometryError` unless the groups of ``spec`` are consistent."""
    names = Counter(group.name for group in spec.groups)
    layers = Counter(layer for group in spec.groups if not group.state for layer in group.layers)
    _require(max(names.values()) == 1, "groups", "two groups have one name")
    _require(max(layers.values(), default=1) == 1, "layers", "a layer is in two groups")
    for group in spec.groups:
        _require(
            len(set(group.layers)) == len(group.layers),
            "layers",
            f"group '{group.name}' names a layer twice",
        )
        _require(
            group.dtype in DTYPE_SIZES_BYTES,
            "dtype",
            f"dtype '{group.dtype}' of group '{group.name}' is not one of "
            + ", ".join(DTYPE_SIZES_BYTES),
        )
        _require(
            len(set(group.parts)) == len(group.parts),
            "parts",
            f"group '{group.name}' names a part twice",
        )
        _require(
            not group.state or group == _as_state(group),
            "state",
            f"group '{group.name}' is a state: make it with state_group",
        )


def _as_state(group: GroupSpec) -> GroupSpec:
    return state_group(group.name, group.layers, group.state, optional=group.optional)


def validate_rank(spec: EngineSpec, rank: RankSpec) -> None:
    """Raise `GeometryError` unless ``rank`` is a possible rank of ``spec``.

    Checks the rank's number, each region against its group and segment, that no two regions
    overlap, and that every layer of its pipeline stage is held exactly once, with all its parts.
    Regions of different groups may share bytes, but only those of equal block ids.
    """
    _require(rank.rank < spec.num_ranks, "rank", f"rank {rank.rank} of {spec.num_ranks} ranks")
    sizes = {segment.segment_id: segment.size_bytes for segment in rank.segments}
    _require(len(sizes) == len(rank.segments), "segments", "two segments have one id")
    for number, region in enumerate(rank.regions):
        _validate_region(spec, region, sizes, where=f"region {number}")
    for group in spec.groups:
        _validate_coverage(group, rank, whole=spec.pp_size == 1)
    _refuse_overlaps(spec, rank)


def validate_ranks(spec: EngineSpec, ranks: Iterable[RankSpec]) -> None:
    """Raise `GeometryError` unless valid ``ranks`` are all of ``spec`` and together hold its KV.

    A replica may be missing, but not the last holder of a layer's part and head.
    """
    ranks = tuple(ranks)
    ordered = sorted(rank.rank for rank in ranks)
    _require(
        ordered == list(range(spec.num_ranks)),
        "ranks",
        f"engine '{spec.engine_id}' has ranks {ordered} of {spec.num_ranks}",
    )
    held = {
        (region.group, layer, part, head)
        for rank in ranks
        for region in rank.regions
        for layer, part in product(region.layers, region.parts)
        for head in range(region.first_head, region.first_head + region.num_heads)
    }
    for group in spec.groups:
        for layer, part in product(group.layers, group.parts):
            for head in range(group.part_shape(part).num_heads):
                _require(
                    (group.name, layer, part, head) in held,
                    "ranks",
                    f"no rank of engine '{spec.engine_id}' holds head {head} of {layer}/{part}",
                )


def _validate_region(spec: EngineSpec, region: Region, sizes: dict[str, int], where: str) -> None:
    group = next((group for group in spec.groups if group.name == region.group), None)
    if group is None:
        raise GeometryError(f"{where}: no group '{region.group}'", field="group")
    if region.segment_id not in sizes:
        raise GeometryError(f"{where}: no segment '{region.segment_id}'", field="segment_id")
    _validate_axes(group, region, where)
    _validate_extent(group, region, sizes[region.segment_id], where)


def _validate_axes(group: GroupSpec, region: Region, where: str) -> None:
    names = [axis.name for axis in region.axes]
    _require(len(set(names)) == len(names), "axes", f"{where}: an axis is named twice")
    _require(set(region.layers) <= set(group.layers), "layers", f"{where}: layer not in its group")
    _require(set(region.parts) <= set(group.parts), "parts", f"{where}: part not in its group")
    shape = group.part_shape(region.parts[0])
    _require(
        all(group.part_shape(part) == shape for part in region.parts),
        "parts",
        f"{where}: parts of different shapes need regions of their own",
    )
    expected = {
        AxisName.LAYER: len(region.layers),
        AxisName.KV: len(region.parts),
        AxisName.TOKEN: group.block_size,
        AxisName.HEAD: region.num_heads,
        AxisName.DIM: shape.head_dim,
    }
    for name, size in expected.items():
        _require(
            region.size(name) == size,
            f"axes.{name}",
            f"{where}: axis '{name}' has size {region.size(name)}, the spec says {size}",
        )
    _require(
        region.first_head + region.num_heads <= shape.num_heads,
        "num_heads",
        f"{where}: heads {region.first_head} to {region.first_head + region.num_heads} "
        f"of {shape.num_heads}",
    )


def _validate_extent(group: GroupSpec, region: Region, size_bytes: int, where: str) -> None:
    itemsize = DTYPE_SIZES_BYTES[group.dtype]
    extent = itemsize
    for axis in _inner_first(region):
        _require(
            axis.size == 1 or axis.stride_bytes >= extent,
            f"axes.{axis.name}",
            f"{where}: axis '{axis.name}' steps {axis.stride_bytes} bytes over {extent} bytes "
            "of inner axes, so elements overlap",
        )
        extent += _reach(axis)
    _require(
        region.offset_bytes + extent <= size_bytes,
        "offset_bytes",
        f"{where}: ends at byte {region.offset_bytes + extent} of a segment of {size_bytes}",
    )


def _validate_coverage(group: GroupSpec, rank: RankSpec, *, whole: bool) -> None:
    regions = [region for region in rank.regions if region.group == group.name]
    held = Counter(
        (layer, part) for region in regions for layer, part in product(region.layers, region.parts)
    )
    layers = group.layers if whole else {layer for layer, _ in held}
    missing = set(product(layers, group.parts)) - held.keys()
    _require(
        not missing,
        "regions",
        f"rank {rank.rank} lacks {len(missing)} of group '{group.name}', "
        f"such as {'/'.join(map(str, min(missing, default=())))}",
    )
    _require(max(held.values(), default=1) == 1, "regions", f"rank {rank.rank} holds a layer twice")
    heads = {
        (part, region.first_head, region.num_heads) for region in regions for part in region.parts
    }
    parts = {part for part, _, _ in heads}
    _require(
        len(heads) == len(parts),
        "first_head",
        f"regions of group '{group.name}' differ in heads",
    )
    blocks = {region.size(AxisName.BLOCK) for region in regions}
    _require(len(blocks) <= 1, "axes.block", f"regions of group '{group.name}' differ in blocks")


class _Span(NamedTuple):
    """A region, or a part of one, from its first byte to its last.

    ``axes`` are those along which its contiguous runs repeat, outermost first.
    """

    start: int
    stop: int
    axes: tuple[Axis, ...]
    region: Region


def _span(spec: EngineSpec, region: Region) -> _Span:
    run_bytes = DTYPE_SIZES_BYTES[spec.group(region.group).dtype]
    axes = [axis for axis in _inner_first(region) if axis.size > 1]
    stop = region.offset_bytes + run_bytes + sum(map(_reach, axes))
    while axes and axes[0].stride_bytes == run_bytes:
        run_bytes *= axes.pop(0).size
    return _Span(region.offset_bytes, stop, tuple(reversed(axes)), region)


def _inner_first(region: Region) -> list[Axis]:
    return sorted(region.axes, key=lambda axis: (axis.stride_bytes, axis.size))


def _reach(axis: Axis) -> int:
    return (axis.size - 1) * axis.stride_bytes


def _refuse_overlaps(spec: EngineSpec, rank: RankSpec) -> None:
    spans = [_span(spec, region) for region in rank.regions]
    for in_segment in _by("region.segment_id", spans):
        for cluster in _touching(in_segment):
            if _share_a_cell(cluster):
                for of_group in _by("region.group", cluster):
                    _refuse_interleaved(of_group)
            else:
                _refuse_interleaved(cluster)


def _share_a_cell(spans: list[_Span]) -> bool:
    """Whether block b of a region can only share bytes with block b of another.

    So it is when all step as far from block to block, and what they have of one block fits there.
    """
    (step, *others) = {span.region.stride_bytes(AxisName.BLOCK) for span in spans}
    stops = (span.stop - (span.region.size(AxisName.BLOCK) - 1) * step for span in spans)
    return not others and max(stops) - min(span.start for span in spans) <= step


def _by(name: str, spans: list[_Span]) -> list[list[_Span]]:
    key = attrgetter(name)
    return [list(alike) for _, alike in groupby(sorted(spans, key=key), key)]


def _touching(spans: list[_Span]) -> list[list[_Span]]:
    """Spans that overlap, directly or through others; most are alone."""
    clusters: list[list[_Span]] = []
    reach = 0
    for span in sorted(spans, key=attrgetter("start")):
        if not clusters or span.start >= reach:
            clusters.append([])
        clusters[-1].append(span)
        reach = max(reach, span.stop)
    return clusters


# Regions whose spans interleave, such as K and V of one tensor, are compared from the outermost
# axis inwards, and never block by block. Where all of them step S bytes along that axis, index i
# of one meets index j of another only if |i - j| * S is less than what all of them have of their
# first index, from its first byte to its last. So it is enough to compare the few indices that are
# as near as that: index 0 alone where this fits into S bytes, as it does where a block is one cell,
# however many blocks there are. Each of them is a span with one axis less.
def _refuse_interleaved(spans: list[_Span]) -> None:
    num_compared, pending = 0, [spans]
    while pending:
        for cluster in _touching(pending.pop()):
            if len(cluster) == 1:
                continue
            segment = cluster[0].region.segment_id
            steps = {span.axes[0].stride_bytes if span.axes else 0 for span in cluster}
            step = max(steps)
            _require(step > 0, "regions", f"two regions in segment '{segment}' overlap")
            sizes = [_size(span, step) for span in cluster]
            if len(steps) == 1:
                start = min(span.start for span in cluster)
                stop = max(_at(span, step, 0).stop for span in cluster)
                sizes = [min(size, (stop - start - 1) // step + 1) for size in sizes]
            num_compared += sum(sizes)
            _require(
                num_compared <= MAX_COMPARED_SPANS,
                "regions",
                f"regions in segment '{segment}' interleave in more than {MAX_COMPARED_SPANS} "
                "spans: describe them as one region",
            )
            pairs = zip(cluster, sizes, strict=True)
            pending.append([_at(span, step, n) for span, size in pairs for n in range(size)])


def _size(span: _Span, step: int) -> int:
    """The size of its outermost axis, if that has this stride, else 1."""
    return span.axes[0].size if span.axes and span.axes[0].stride_bytes == step else 1


def _at(span: _Span, step: int, index: int) -> _Span:
    """What the span has of one index of its outermost axis, if that has this stride, else all."""
    size = _size(span, step)
    if size == 1:
        return span
    by = index * step
    stop = span.stop - (size - 1) * step + by
    return span._replace(start=span.start + by, stop=stop, axes=span.axes[1:])


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise GeometryError(message, field=field)
