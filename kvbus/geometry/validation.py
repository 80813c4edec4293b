"""Validation of specs; each `GeometryError` names the field."""

from collections import Counter
from collections.abc import Iterable, Iterator
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
    Tile,
    state_group,
)

MAX_COMPARED_SPANS = 1 << 13
"""About 10 ms. A rank whose regions interleave regularly needs one per region and axis."""


def validate_engine(spec: EngineSpec) -> None:
    """Raise `GeometryError` if groups contradict each other or themselves."""
    attending = [group for group in spec.groups if not group.state]
    held = [pair for group in attending for pair in {*product(group.layers, group.parts)}]
    _require(_differ(group.name for group in spec.groups), "groups", "two groups have one name")
    _require(_differ(held), "layers", "a part of a layer is in two groups")
    for group in spec.groups:
        _require(_differ(group.layers), "layers", f"group '{group.name}' names a layer twice")
        _require(_differ(group.parts), "parts", f"group '{group.name}' names a part twice")
        _require(
            group.dtype in DTYPE_SIZES_BYTES,
            "dtype",
            f"dtype '{group.dtype}' of group '{group.name}' is not one of "
            + ", ".join(DTYPE_SIZES_BYTES),
        )
        as_state = state_group(group.name, group.layers, group.state, optional=group.optional)
        _require(
            not group.state or group == as_state,
            "state",
            f"group '{group.name}' is a state: make it with state_group",
        )


def validate_rank(spec: EngineSpec, rank: RankSpec) -> None:
    """Raise `GeometryError` if regions leave their segments, overlap, or lack a part of a layer.

    Regions of two groups may overlap if only blocks of equal id share bytes.
    """
    _require(rank.rank < spec.num_ranks, "rank", f"rank {rank.rank} of {spec.num_ranks} ranks")
    sizes = {segment.segment_id: segment.size_bytes for segment in rank.segments}
    _require(len(sizes) == len(rank.segments), "segments", "two segments have one id")
    groups = {group.name: group for group in spec.groups}
    for index, region in enumerate(rank.regions):
        where, group = f"region {index}", groups.get(region.group)
        if group is None:
            raise GeometryError(f"{where}: no group '{region.group}'", field="group")
        size_bytes = sizes.get(region.segment_id)
        if size_bytes is None:
            raise GeometryError(f"{where}: no segment '{region.segment_id}'", field="segment_id")
        check_axes(group, region, where)
        _validate_extent(group, region, size_bytes, where)
    for group in spec.groups:
        needs_all_layers = spec.pp_size == 1 and not group.state
        _validate_coverage(group, rank, needs_all_layers=needs_all_layers)
    _refuse_overlaps(spec, rank)


def validate_ranks(spec: EngineSpec, ranks: Iterable[RankSpec]) -> None:
    """Raise `GeometryError` unless the ranks are complete and hold each head at least once."""
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


def check_held(group: GroupSpec, held: Region | Tile, where: str) -> None:
    for field, named, known in (
        ("layers", held.layers, group.layers),
        ("parts", held.parts, group.parts),
    ):
        others = ", ".join(sorted(map(str, set(named).difference(known))))
        _require(not others, field, f"{where}: group '{group.name}' has no {field} {others}")
        _require(_differ(named), field, f"{where}: one of the {field} is named twice")
    shapes = [group.part_shape(part) for part in held.parts]
    sizes = {shape.head_dim for shape in shapes}
    _require(len(sizes) == 1, "parts", f"{where}: describe parts whose heads differ in size apart")
    first, end = held.first_head, held.first_head + held.num_heads
    num_heads = min(shape.num_heads for shape in shapes)
    _require(end <= num_heads, "num_heads", f"{where}: heads {first} to {end} of {num_heads}")


def check_axes(group: GroupSpec, region: Region, where: str) -> None:
    """Raise `GeometryError` unless the axes have the sizes of the group and the region."""
    names = [axis.name for axis in region.axes]
    _require(_differ(names), "axes", f"{where}: an axis is named twice")
    check_held(group, region, where)
    shape, *others = {group.part_shape(part) for part in region.parts}
    _require(not others, "parts", f"{where}: parts of different shapes need regions of their own")
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
            f"{where}: axis '{name}' has size {region.size(name)}, the spec requires {size}",
        )


def _validate_extent(group: GroupSpec, region: Region, size_bytes: int, where: str) -> None:
    extent = DTYPE_SIZES_BYTES[group.dtype]
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


def _validate_coverage(group: GroupSpec, rank: RankSpec, *, needs_all_layers: bool) -> None:
    regions = [region for region in rank.regions if region.group == group.name]
    held = Counter(
        (layer, part) for region in regions for layer, part in product(region.layers, region.parts)
    )
    layers = group.layers if needs_all_layers else {layer for layer, _ in held}
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
    _require(
        _differ(part for part, *_ in heads),
        "first_head",
        f"regions of group '{group.name}' differ in heads",
    )
    blocks = {region.size(AxisName.BLOCK) for region in regions}
    _require(len(blocks) <= 1, "axes.block", f"regions of group '{group.name}' differ in blocks")


class _Span(NamedTuple):
    """``axes`` are those along which its contiguous runs repeat, outermost first."""

    start: int
    stop: int
    axes: tuple[Axis, ...]
    region: Region

    @property
    def step(self) -> int:
        return self.axes[0].stride_bytes if self.axes else 0

    def first(self, num: int) -> list["_Span"]:
        stop, axes, region = self.stop - _reach(self.axes[0]), self.axes[1:], self.region
        starts = (index * self.step for index in range(num))
        return [_Span(self.start + by, stop + by, axes, region) for by in starts]


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
            apart = _by("region.group", cluster) if _share_a_cell(cluster) else [cluster]
            for together in apart:
                _refuse_interleaved(together)


def cells_of(spec: EngineSpec, rank: RankSpec) -> Iterator[list[Region]]:
    """Yield regions together whose blocks of one id lie in one cell, and all others alone."""
    for in_segment in _by("region.segment_id", [_span(spec, one) for one in rank.regions]):
        for cluster in _touching(in_segment):
            regions = [span.region for span in cluster]
            yield from [regions] if _share_a_cell(cluster) else ([one] for one in regions)


def _share_a_cell(spans: list[_Span]) -> bool:
    """Return whether block b of a region can share bytes only with block b of another."""
    (step, *others) = {span.region.stride_bytes(AxisName.BLOCK) for span in spans}
    stops = (span.stop - (span.region.size(AxisName.BLOCK) - 1) * step for span in spans)
    return not others and max(stops) - min(span.start for span in spans) <= step


def _by(name: str, spans: list[_Span]) -> list[list[_Span]]:
    key = attrgetter(name)
    return [list(alike) for _, alike in groupby(sorted(spans, key=key), key)]


def _touching(spans: list[_Span]) -> list[list[_Span]]:
    clusters: list[list[_Span]] = []
    reach = 0
    for span in sorted(spans, key=attrgetter("start")):
        if not clusters or span.start >= reach:
            clusters.append([])
        clusters[-1].append(span)
        reach = max(reach, span.stop)
    return clusters


# Regions with interleaved spans, such as K and V of one tensor, are compared from the outermost
# axis inwards, never block by block. Suppose that all of them step S bytes along that axis. Let D
# be the bytes that they span together at their first index. Index i of one can overlap index j
# of another only if |i - j| * S is less than D. So comparing the first few indices, up to that
# distance, is enough. If D is at most S, as with blocks that are one cell, index 0 alone is enough
# for any number of blocks. Each compared index is a span with one axis less.
def _refuse_interleaved(spans: list[_Span]) -> None:
    num_compared, pending = 0, [spans]
    while pending:
        for cluster in _touching(pending.pop()):
            if len(cluster) == 1:
                continue
            segment, step = cluster[0].region.segment_id, max(span.step for span in cluster)
            _require(step > 0, "regions", f"two regions in segment '{segment}' overlap")
            sizes = [span.axes[0].size if span.step == step else 1 for span in cluster]
            if all(span.step == step for span in cluster):
                start = min(span.start for span in cluster)
                stop = max(span.stop - _reach(span.axes[0]) for span in cluster)
                sizes = [min(size, (stop - start - 1) // step + 1) for size in sizes]
            num_compared += sum(sizes)
            _require(
                num_compared <= MAX_COMPARED_SPANS,
                "regions",
                f"regions in segment '{segment}' interleave in more than {MAX_COMPARED_SPANS} "
                "spans: describe them as one region",
            )
            parts: list[_Span] = []
            for span, size in zip(cluster, sizes, strict=True):
                parts += span.first(size) if span.step == step else [span]
            pending.append(parts)


def _differ(names: Iterable[object]) -> bool:
    names = tuple(names)
    return len(set(names)) == len(names)


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise GeometryError(message, field=field)
