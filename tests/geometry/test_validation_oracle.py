"""`validate_rank` accepts exactly the ranks whose elements each have bytes of their own."""

from itertools import product

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, EngineSpec, RankSpec, Region, validate_rank
from tests.geometry.layouts import byte_offset, elements, engines, group_specs, ranks

replace = msgspec.structs.replace
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def possible(draw: st.DrawFn) -> tuple[EngineSpec, RankSpec]:
    """An engine and a rank laid out without collisions."""
    engine = draw(engines(draw(group_specs()), tp_size=1))
    return engine, draw(ranks(engine, 0, num_blocks=draw(st.integers(1, 3))))


@st.composite
def nudged(draw: st.DrawFn) -> tuple[EngineSpec, RankSpec]:
    """As `possible`, but with one offset, stride or segment size moved by a few bytes."""
    engine, rank = draw(possible())
    number = draw(st.integers(0, len(rank.regions) - 1))
    region, by = rank.regions[number], draw(st.integers(-12, 12))
    kind = draw(st.sampled_from(["offset", "stride", "segment"]))
    if kind == "segment":
        one, *others = rank.segments
        smaller = replace(one, size_bytes=max(1, one.size_bytes + by))
        return engine, replace(rank, segments=(smaller, *others))
    if kind == "offset":
        region = replace(region, offset_bytes=max(0, region.offset_bytes + by))
    else:
        moved = draw(st.integers(0, len(region.axes) - 1))
        axes = list(region.axes)
        axes[moved] = replace(axes[moved], stride_bytes=max(0, axes[moved].stride_bytes + by))
        region = replace(region, axes=tuple(axes))
    regions = list(rank.regions)
    regions[number] = region
    return engine, replace(rank, regions=tuple(regions))


def every_byte_is_used_once(engine: EngineSpec, rank: RankSpec) -> bool:
    """The oracle: a plain set of (segment, byte), in no cleverer way than one by one."""
    sizes = {segment.segment_id: segment.size_bytes for segment in rank.segments}
    used: set[tuple[str, int]] = set()
    for region in rank.regions:
        group = engine.group(region.group)
        for element in elements(region, group):
            start = byte_offset(region, element)
            for byte in range(start, start + DTYPE_SIZES_BYTES[group.dtype]):
                if (region.segment_id, byte) in used or byte >= sizes[region.segment_id]:
                    return False
                used.add((region.segment_id, byte))
    return True


def nests(region: Region, itemsize: int) -> bool:
    """The further rule: each axis steps over all that the axes of smaller strides span."""
    extent = itemsize
    for axis in sorted(region.axes, key=lambda axis: (axis.stride_bytes, axis.size)):
        if axis.size > 1 and axis.stride_bytes < extent:
            return False
        extent += (axis.size - 1) * axis.stride_bytes
    return True


def accepts(engine: EngineSpec, rank: RankSpec) -> bool:
    try:
        validate_rank(engine, rank)
    except GeometryError:
        return False
    return True


@MANY
@given(possible())
def test_every_cut_of_every_tensor_that_does_not_collide_is_accepted(
    case: tuple[EngineSpec, RankSpec],
) -> None:
    assert every_byte_is_used_once(*case)

    validate_rank(*case)


@MANY
@given(nudged())
def test_a_nudged_rank_is_accepted_exactly_when_no_byte_is_used_twice_or_outside(
    case: tuple[EngineSpec, RankSpec],
) -> None:
    engine, rank = case
    nested = all(
        nests(region, DTYPE_SIZES_BYTES[engine.group(region.group).dtype])
        for region in rank.regions
    )

    accepted = accepts(engine, rank)

    event(f"accepted: {accepted}, nested: {nested}")
    assert accepted == (every_byte_is_used_once(engine, rank) and nested)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_strides_that_nest_never_put_two_elements_at_one_byte(
    sizes: list[int], data: st.DataObject
) -> None:
    strides = [data.draw(st.integers(0, 12)) for _ in sizes]
    extent, nested = 1, True
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        nested = nested and (size == 1 or stride >= extent)
        extent += (size - 1) * stride
    starts = [
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in product(*map(range, sizes))
    ]

    unique = len(set(starts)) == len(starts)

    assert unique or not nested
