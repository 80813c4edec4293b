"""What a fetch is on each path, against plain loops over every element."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    AxisName,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    Region,
    SlotOrder,
    StatePart,
    canonical_order,
    lay_out_rank,
    slot_region,
    state_group,
)
from kvbus.planning import (
    FetchWork,
    Path,
    PathWork,
    PlacedRank,
    ReadMap,
    Share,
    cut_into_boxes,
    reader_order,
    whole_spans,
)
from tests.geometry.layouts import Element, byte_offset
from tests.planning.handoffs import placed_ranks, some

EXHAUSTIVE = some(300)
AT_0 = {"kv": 0}
Place = tuple[int, int, int]
"""Region, block, byte: bytes of different regions or blocks are never neighbours."""
Where = Callable[[Element], Place]


@dataclass(frozen=True)
class Case:
    prefill: dict[int, PlacedRank]
    decode: dict[int, PlacedRank]
    shares: tuple[Share, ...]
    joined: tuple[Share, ...]
    start: int
    stop: int

    @property
    def group(self) -> GroupSpec:
        return self.decode[0].engine.groups[0]

    def work(self) -> FetchWork:
        return FetchWork(self.prefill, self.decode, self.shares, self.joined)


def placed(group: GroupSpec, layout: KvLayout, tp_size: int, pp_size: int) -> dict[int, PlacedRank]:
    return placed_ranks(EngineSpec("engine", "model", tp_size, (group,), pp_size), layout)


def of_sides(
    prefill: dict[int, PlacedRank], decode: dict[int, PlacedRank], start: int, stop: int
) -> Case:
    reads = ReadMap(*([one.rank for one in side.values()] for side in (prefill, decode)))
    return Case(prefill, decode, reads.shares(), reads.joined(), start, stop)


@st.composite
def sides(draw: st.DrawFn, group: GroupSpec) -> dict[int, PlacedRank]:
    axes = draw(st.permutations(list(AxisName)))
    if draw(st.booleans()):
        axes.remove(AxisName.LAYER)
    sized = msgspec.structs.replace(group, block_size=draw(st.integers(1, 4)))
    layout = KvLayout(tuple(axes))
    return placed(sized, layout, tp_size=draw(st.integers(1, 3)), pp_size=draw(st.integers(1, 2)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group = GroupSpec(
        name="group",
        layers=(0, 1, 2),
        block_size=1,
        num_kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from(["float16", "uint8"])),
        parts=draw(st.sampled_from([(KvPart.KEY, KvPart.VALUE), (KvPart.LATENT,)])),
    )
    start = draw(st.integers(0, 5))
    span = (start, start + draw(st.integers(1, 8)))
    return of_sides(draw(sides(group)), draw(sides(group)), *span)


@EXHAUSTIVE
@given(cases())
def test_descriptors_and_runs_are_those_that_plain_loops_count(case: Case) -> None:
    spans = whole_spans([case.group], [case.group], case.start, case.stop)

    shape = case.work().shape(spans, mapped=True)

    runs = {"direct": 0, "gather": 0, "scatter": 0, "reordered gather": 0, "reordered read": 0}
    for share in case.shares:
        holder, reader = case.prefill[share.holder], case.decode[share.reader]
        order = reader_order(reader.rank.regions, case.group)
        assert order is not None
        remote, local = in_engine(holder), in_engine(reader)
        reordered = in_slot(case, share, order, block_size=case.group.block_size)
        runs["direct"] += num_runs(case, share, remote, local)
        runs["reordered gather"] += num_runs(case, share, remote, reordered)
        runs["reordered read"] += num_runs(case, share, reordered, local)
    for share in case.joined:
        canonical = in_slot(case, share, canonical_order(), block_size=None)
        runs["gather"] += num_runs(case, share, in_engine(case.prefill[share.holder]), canonical)
        for reader_number in share.readers:
            local = in_engine(case.decode[reader_number])
            runs["scatter"] += num_runs(case, share, canonical, local)
    num_bytes, joined_bytes = (
        sum(len(list(elements_of(case, share))) for share in shares) * itemsize(case)
        for shares in (case.shares, case.joined)
    )
    packed = shape[Path.PACKED]
    assert shape[Path.DIRECT].num_bytes == num_bytes
    assert packed.num_bytes == joined_bytes
    assert packed.num_bytes * packed.num_copies == pytest.approx(num_bytes)
    assert shape[Path.DIRECT].num_descriptors == runs["direct"]
    assert shape[Path.MAPPED] == PathWork(num_bytes=num_bytes, num_copied_runs=runs["direct"])
    assert runs_of(joined_bytes, packed.gather_run_bytes) == runs["gather"]
    assert runs_of(num_bytes, packed.scatter_run_bytes) == runs["scatter"]
    reordered_bytes = shape[Path.REORDERED].gather_run_bytes
    assert runs_of(num_bytes, reordered_bytes) == runs["reordered gather"]
    assert shape[Path.REORDERED].num_descriptors == runs["reordered read"]
    assert packed.num_shares == len(case.joined)
    assert shape[Path.REORDERED].num_shares == len(case.shares)


@EXHAUSTIVE
@given(cases())
def test_the_least_box_is_the_smallest_that_a_share_can_be_cut_into(case: Case) -> None:
    work = case.work()
    spans = whole_spans([case.group], [case.group], case.start, case.stop)
    orders = {
        Path.PACKED: canonical_order(),
        Path.REORDERED: reader_order(case.decode[0].rank.regions, case.group),
    }

    for path, order in orders.items():
        least = work.least_box_bytes(path)
        assert order is not None
        for share in case.shares:
            span = spans[share.group]
            assert cut_into_boxes(share, case.group, span, order=order, box_bytes=least)

        assert work.shape(spans, slot_bytes=least).get(path) is not None
        assert work.shape(spans, slot_bytes=least - 1).get(path) is None


def runs_of(num_bytes: int, run_bytes: float | None) -> int:
    assert run_bytes is not None
    return round(num_bytes / run_bytes)


def elements_of(case: Case, share: Share) -> Iterator[Element]:
    """With the position in the place of the token, in block 0."""
    head_dim = case.group.part_shape(share.parts[0]).head_dim
    heads = range(share.first_head, share.first_head + share.num_heads)
    positions = range(case.start, case.stop)
    for place in product((0,), share.layers, share.parts, positions, heads, range(head_dim)):
        yield Element(*place)


def itemsize(case: Case) -> int:
    return DTYPE_SIZES_BYTES[case.group.dtype]


def in_engine(placed: PlacedRank) -> Where:
    block_size = placed.engine.groups[0].block_size

    def where(element: Element) -> Place:
        for number, region in enumerate(placed.rank.regions):
            if element.layer in region.layers and element.part in region.parts:
                return (number, *in_block(region, element, block_size))
        raise AssertionError(element)

    return where


def in_slot(case: Case, share: Share, order: SlotOrder, *, block_size: int | None) -> Where:
    """In a slot that goes on after the last position; without ``block_size`` it has no blocks."""
    heads = (share.first_head, share.num_heads)
    box = Box(share.group, share.layers, share.parts, *heads, 0, case.stop + 8)
    region = slot_region(case.group, box, order)

    def where(element: Element) -> Place:
        if block_size is None:
            return 0, 0, byte_offset(region, as_block(element, 1))
        return (0, *in_block(region, element, block_size))

    return where


def in_block(region: Region, element: Element, block_size: int) -> tuple[int, int]:
    found = as_block(element, block_size)
    return found.block, byte_offset(region, replace(found, block=0))


def as_block(one: Element, block_size: int) -> Element:
    """The element with block and token of its position, which stands where the token will."""
    block, token = divmod(one.token, block_size)
    return replace(one, block=block, token=token)


def num_runs(case: Case, share: Share, source: Where, target: Where) -> int:
    """Pieces that are contiguous in both places, of the length that repeats in a block.

    Where the last unit of one layer happens to touch the first of the next on both sides, they
    still count as two.
    """
    blocks: dict[tuple[Place, Place], list[tuple[int, int]]] = defaultdict(list)
    for element in elements_of(case, share):
        to, at = target(element), source(element)
        blocks[(*to[:2], 0), (*at[:2], 0)].append((to[2], at[2]))
    return sum(_num_repeats(sorted(moves), itemsize(case)) for moves in blocks.values())


def _num_repeats(moves: list[tuple[int, int]], step: int) -> int:
    lengths = [1]
    for here, there in pairwise(moves):
        if there == (here[0] + step, here[1] + step):
            lengths[-1] += 1
        else:
            lengths.append(1)
    return len(moves) // min(lengths)


NHD, HND = (KvLayout.parse(name) for name in ("NHD", "HND"))
GROUP = GroupSpec("group", (0, 1), 16, 8, 128, "bfloat16")


def test_nhd_for_twice_the_ranks_has_short_runs_on_the_side_with_all_heads() -> None:
    case = of_sides(placed(GROUP, NHD, 1, 1), placed(GROUP, NHD, 2, 1), 0, 32)

    shape = case.work().shape({"group": (0, 32)})

    assert shape[Path.DIRECT].num_descriptors == 2 * 2 * 2 * 32  # ranks, layers, parts, tokens
    assert shape[Path.PACKED].gather_run_bytes == 4 * 128 * 2
    assert shape[Path.PACKED].scatter_run_bytes == 16 * 4 * 128 * 2
    assert (
        shape[Path.REORDERED].num_descriptors == 2 * 2 * 2
    )  # ranks, layers, blocks: K and V touch


def test_slots_in_the_readers_order_have_whole_blocks() -> None:
    case = of_sides(placed(GROUP, HND, 1, 1), placed(GROUP, HND, 1, 1), 31, 33)

    shape = case.work().shape({"group": (31, 33)})

    assert shape[Path.PACKED].num_bytes == 2 * 2 * 2 * 8 * 128 * 2  # layers, parts, tokens, heads
    assert shape[Path.REORDERED].num_bytes == 16 * shape[Path.PACKED].num_bytes


def test_a_state_counts_at_its_one_position() -> None:
    state = state_group("state", (0, 1), (StatePart("conv", 4, 512), StatePart("sum", 1, 8)))
    case = of_sides(placed(state, NHD, 2, 1), placed(state, NHD, 1, 1), 0, 100)

    shape = case.work().shape(whole_spans([state], [state], 0, 100))

    assert shape[Path.DIRECT].num_bytes == 2 * (4 * 512 + 8)
    assert shape[Path.DIRECT].num_descriptors == 2 * (2 + 1)


def test_shares_without_positions_do_not_count() -> None:
    state = state_group("state", (2,), (StatePart("conv", 4, 512),))
    engine = EngineSpec("engine", "model", 1, (GROUP, state))
    rank = lay_out_rank(engine, 0, NHD, num_blocks=4)
    side = {0: PlacedRank(engine, rank, AT_0)}

    shape = of_sides(side, side, 0, 16).work().shape({"group": (0, 16), "state": (0, 0)})

    assert shape[Path.PACKED].num_shares == 1
    assert shape[Path.PACKED].num_bytes == 2 * 2 * 16 * 8 * 128 * 2


def test_a_fetch_of_nothing_has_no_boxes() -> None:
    case = of_sides(placed(GROUP, NHD, 1, 1), placed(GROUP, NHD, 1, 1), 0, 0)

    shape = case.work().shape({"group": (7, 7)}, mapped=True)

    assert (shape[Path.DIRECT].num_bytes, shape[Path.DIRECT].num_descriptors) == (0, 0)
    assert shape[Path.MAPPED] == PathWork(num_bytes=0, num_copied_runs=0)
    assert set(shape) == {Path.DIRECT, Path.MAPPED}


@pytest.mark.parametrize(
    ("prefill", "decode", "closed"),
    [(True, False, {"direct", "reordered"}), (False, True, {"direct"}), (True, True, set())],
)
def test_ranks_without_addresses_are_read_in_boxes_and_mapped_as_ever(
    prefill: bool, decode: bool, closed: set[str]
) -> None:
    nhd, hnd, spans = placed(GROUP, NHD, 2, 1), placed(GROUP, HND, 1, 1), {"group": (0, 40)}
    usual = of_sides(nhd, hnd, 0, 40).work().shape(spans, mapped=True)
    for side, direct in ((nhd, prefill), (hnd, decode)):
        if not direct:
            side[max(side)] = replace(side[max(side)], addresses={})
    work = of_sides(nhd, hnd, 0, 40).work()

    shape = work.shape(spans, mapped=True)

    for path in Path:
        assert shape.get(path) == (None if path in closed else usual.get(path))
    assert Path.MAPPED not in work.shape(spans)


def test_a_reader_whose_regions_differ_in_order_cannot_have_it_in_its_order() -> None:
    mixed = placed(GROUP, NHD, 1, 1)
    other = placed(GROUP, HND, 1, 1)[0].rank.regions[1]
    rank = msgspec.structs.replace(mixed[0].rank, regions=(mixed[0].rank.regions[0], other))
    decode = {0: PlacedRank(mixed[0].engine, rank, AT_0)}

    shape = of_sides(placed(GROUP, NHD, 1, 1), decode, 0, 16).work().shape({"group": (0, 16)})

    assert Path.PACKED in shape
    assert Path.REORDERED not in shape
