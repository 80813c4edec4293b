"""`validate_rank` accepts the ranks whose elements each have bytes of their own.

Blocks of one id, but of different groups, may share theirs.
"""

from itertools import product

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    Axis,
    AxisName,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
    validate_rank,
)
from tests.support.examples import num_examples
from tests.unit.geometry.layouts import Element, byte_offset
from tests.unit.planning.handoffs import SLOW, cases

replace = msgspec.structs.replace
MANY = settings(max_examples=num_examples(300), deadline=None, suppress_health_check=SLOW)


Cases = st.SearchStrategy[tuple[EngineSpec, RankSpec]]


@st.composite
def possible(draw: st.DrawFn) -> tuple[EngineSpec, RankSpec]:
    """An engine and a rank of it laid out without collisions."""
    case = draw(cases())
    side = draw(st.sampled_from([case.prefill, case.decode]))
    return side.engine, draw(st.sampled_from([placed.rank for placed in side.ranks.values()]))


@st.composite
def nudged(draw: st.DrawFn, ranks: Cases) -> tuple[EngineSpec, RankSpec]:
    """One of ``ranks`` with one offset, stride or size moved by some bytes, or none."""
    engine, rank = draw(ranks)
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
        moved = draw(st.sampled_from(region.axes))
        nudged = replace(moved, stride_bytes=max(0, moved.stride_bytes + by))
        region = replace(region, axes=tuple(nudged if one is moved else one for one in region.axes))
    regions = (*rank.regions[:number], region, *rank.regions[number + 1 :])
    return engine, replace(rank, regions=regions)


Users = dict[tuple[str, int], list[tuple[str, int]]]


def users_of_bytes(engine: EngineSpec, rank: RankSpec) -> Users:
    """The oracle: the (group, block) of each user of a (segment, byte)."""
    users: Users = {}
    for region in rank.regions:
        group = engine.group(region.group)
        for indices in product(
            range(region.size(AxisName.BLOCK)),
            region.layers,
            region.parts,
            range(group.block_size),
            range(region.first_head, region.first_head + region.num_heads),
            range(group.part_shape(region.parts[0]).head_dim),
        ):
            element = Element(*indices)
            start = byte_offset(region, element)
            for byte in range(start, start + DTYPE_SIZES_BYTES[group.dtype]):
                users.setdefault((region.segment_id, byte), []).append((group.name, element.block))
    return users


def no_byte_is_outside(rank: RankSpec, used: Users) -> bool:
    sizes = {segment.segment_id: segment.size_bytes for segment in rank.segments}
    return all(byte < sizes[segment] for segment, byte in used)


def is_unique_and_sound(engine: EngineSpec, rank: RankSpec) -> tuple[bool, bool]:
    """Whether each byte is used once; and whether only blocks of one number share any."""
    used = users_of_bytes(engine, rank)
    if not no_byte_is_outside(rank, used):
        return False, False
    is_sound = all(
        len({block for _, block in users}) == 1 and len({group for group, _ in users}) == len(users)
        for users in used.values()
    )
    return all(len(users) == 1 for users in used.values()), is_sound


@st.composite
def aliased(draw: st.DrawFn) -> tuple[EngineSpec, RankSpec]:
    """Two groups over the same bytes: each region steps ``cell`` bytes a block, and fits in one."""
    num_blocks, cell = draw(st.integers(1, 3)), draw(st.integers(8, 24))
    groups, regions = [], []
    for number in (0, 1):
        sizes = {name: draw(st.integers(1, 2)) for name in (AxisName.TOKEN, AxisName.HEAD)}
        groups.append(GroupSpec(f"group{number}", (number,), sizes[AxisName.TOKEN], 2, 1, "uint8"))
        num_bytes = sizes[AxisName.TOKEN] * sizes[AxisName.HEAD]
        first = draw(st.integers(0, cell - 2 * num_bytes))
        for part, offset in (
            ("k", first),
            ("v", draw(st.integers(first + num_bytes, cell - num_bytes))),
        ):
            axes = (
                Axis(AxisName.TOKEN, sizes[AxisName.TOKEN], sizes[AxisName.HEAD]),
                Axis(AxisName.BLOCK, num_blocks, cell),
                Axis(AxisName.HEAD, sizes[AxisName.HEAD], 1),
            )
            held = (f"group{number}", (number,), (part,), 0, sizes[AxisName.HEAD])
            regions.append(Region("kv", offset, *held, axes))
    engine = EngineSpec("engine", "model", 2, tuple(groups))
    return engine, RankSpec(0, (Segment("kv", num_blocks * cell),), tuple(regions))


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[EngineSpec, RankSpec]:
    """Regions anywhere in one segment, each with strides of its own or those of the first one."""
    num_regions = draw(st.integers(2, 4))
    sizes = {
        AxisName.BLOCK: draw(st.integers(1, 6)),
        AxisName.TOKEN: draw(st.integers(1, 3)),
        AxisName.HEAD: draw(st.integers(1, 2)),
    }
    regions: list[Region] = []
    for number in range(num_regions):
        axes, extent = [], 1
        for name in draw(st.permutations(list(sizes))):
            stride = extent + draw(st.integers(0, 9))
            axes.append(Axis(name, sizes[name], stride))
            extent += (sizes[name] - 1) * stride
        same = bool(regions) and draw(st.booleans())
        held = ("full", (number,), ("k",), 0, sizes[AxisName.HEAD])
        steps = regions[0].axes if same else tuple(axes)
        regions.append(Region("kv", draw(st.integers(0, 40)), *held, steps))
    tokens, heads = sizes[AxisName.TOKEN], sizes[AxisName.HEAD]
    group = GroupSpec("full", tuple(range(num_regions)), tokens, heads, 1, "uint8", ("k",))
    engine = EngineSpec("engine", "model", 1, (group,))
    return engine, RankSpec(0, (Segment("kv", 4096),), tuple(regions))


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
@given(nudged(possible()) | nudged(aliased()))
def test_nudged_rank_passes_without_unequal_overlap(case: tuple[EngineSpec, RankSpec]) -> None:
    engine, rank = case
    nested = all(
        nests(region, DTYPE_SIZES_BYTES[engine.group(region.group).dtype])
        for region in rank.regions
    )
    accepted = accepts(engine, rank)
    unique, sound = is_unique_and_sound(*case)
    event(f"accepted: {accepted}, nested: {nested}, sound: {sound}, unique: {unique}")
    assert accepted or not (unique and nested)
    assert not accepted or (sound and nested)
    assert accepted or not (sound and nested) or len(engine.groups) > 1


@settings(MANY, max_examples=num_examples(1000))
@given(interleaved())
def test_interleaving_passes_if_no_byte_is_used_twice(case: tuple[EngineSpec, RankSpec]) -> None:
    is_unique, _ = is_unique_and_sound(*case)
    event(f"unique: {is_unique}")
    assert accepts(*case) == is_unique


@MANY
@given(aliased())
def test_groups_may_lie_over_each_other_block_by_block(case: tuple[EngineSpec, RankSpec]) -> None:
    is_unique, is_sound = is_unique_and_sound(*case)
    event(f"apart: {is_unique}")
    assert is_sound
    validate_rank(*case)
