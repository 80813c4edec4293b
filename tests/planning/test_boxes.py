"""Boxes cover a share once, each fits its slot, and a reader's order is that of its memory."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import ceil, inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import (
    AxisName,
    Box,
    EngineSpec,
    GroupSpec,
    KvLayout,
    Region,
    SlotOrder,
    StatePart,
    canonical_order,
    lay_out_rank,
    slot_bytes,
    slot_region,
    state_group,
)
from kvbus.planning import Share, cut_into_boxes, reader_order
from tests.examples import num_examples


@dataclass(frozen=True)
class Case:
    share: Share
    group: GroupSpec
    span: tuple[int, int]
    order: SlotOrder
    box_bytes: int

    def boxes(self) -> tuple[Box, ...]:
        return cut_into_boxes(
            self.share, self.group, self.span, order=self.order, box_bytes=self.box_bytes
        )

    def whole(self) -> Box:
        share = self.share
        return Box(
            share.group, share.layers, share.parts, share.first_head, share.num_heads, *self.span
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A share of some layers, parts and heads, and a slot that holds at least one token."""
    layers = draw(st.permutations([0, 1, 2, 5, 7]))
    group = GroupSpec("full", tuple(layers), draw(st.integers(1, 6)), 4, 3, "float16")
    first_head = draw(st.integers(0, 3))
    share = Share(
        holder=0,
        reader=0,
        group="full",
        layers=tuple(layers[: draw(st.integers(1, 5))]),
        parts=draw(st.sampled_from([("k", "v"), ("v",)])),
        first_head=first_head,
        num_heads=draw(st.integers(1, 4 - first_head)),
    )
    start = draw(st.integers(0, 20))
    span = (start, start + draw(st.integers(1, 40)))
    others = st.builds(SlotOrder, st.permutations(list(AxisName)).map(tuple), st.integers(1, 6))
    order = draw(st.one_of(st.just(canonical_order()), others))
    least = order.block_size * len(share.parts) * share.num_heads * 3 * 2
    return Case(share, group, span, order, least + draw(st.integers(0, 60 * least)))


@settings(max_examples=num_examples(600), deadline=None)
@given(cases())
def test_boxes_hold_every_element_once_and_each_fits_its_slot_and_they_are_few(case: Case) -> None:
    share, boxes = case.share, case.boxes()

    assert Counter(product(share.layers, share.parts, range(*case.span))) == Counter(
        element
        for box in boxes
        for element in product(box.layers, box.parts, range(box.start, box.stop))
    )
    assert {(box.group, box.first_head, box.num_heads) for box in boxes} == {
        ("full", share.first_head, share.num_heads)
    }
    assert all(slot_bytes(case.group, box, case.order) <= case.box_bytes for box in boxes)
    cuts = {edge for box in boxes for edge in (box.start, box.stop)} - set(case.span)
    assert all(cut % case.order.block_size == 0 for cut in cuts)
    assert len(boxes) <= most_boxes(case)


def most_boxes(case: Case) -> float:
    """What whole layers alone, or cut tokens alone, would take."""
    num_layers, (start, stop) = len(case.share.layers), case.span
    whole = msgspec.structs.replace(case.whole(), layers=case.share.layers[:1])
    layer_bytes = slot_bytes(case.group, whole, case.order)
    unit = max(case.group.block_size * case.order.block_size, 1)
    position = msgspec.structs.replace(whole, start=0, stop=case.order.block_size)
    unit_bytes = slot_bytes(case.group, position, case.order) // case.order.block_size * unit
    most = inf
    if layer_bytes <= case.box_bytes:
        most = ceil(num_layers / (case.box_bytes // layer_bytes))
    if unit_bytes * num_layers <= case.box_bytes:
        num_units = ceil(stop / unit) - start // unit
        most = min(most, ceil(num_units / (case.box_bytes // (unit_bytes * num_layers))))
    return most


FULL = GroupSpec("full", tuple(range(16)), 16, 8, 128, "bfloat16")
SHARE = Share(0, 0, "full", FULL.layers, FULL.parts, 4, 4)


def _cut(num_tokens: int, box_bytes: int, order: SlotOrder | None = None) -> tuple[Box, ...]:
    order = order or canonical_order()
    return cut_into_boxes(SHARE, FULL, (0, num_tokens), order=order, box_bytes=box_bytes)


FEW_HEADS = Share(0, 0, "full", FULL.layers[:8], FULL.parts, 4, 1)
CUTS = {  # share, tokens and bytes of a slot; boxes, and the layers and tokens of each
    "all_that_fits": (SHARE, 256, 8 << 20, 1, (16, 256)),
    "long_blocks_of_few_layers": (SHARE, 2048, 8 << 20, 8, (4, 1024)),
    "short_blocks_are_as_long_as_they_can_be": (FEW_HEADS, 2048, 1 << 20, 8, (8, 256)),
    "no_positions": (SHARE, 0, 1, 0, None),
}


@pytest.mark.parametrize("case", CUTS)
def test_boxes_fill_their_slots(case: str) -> None:
    share, num_tokens, box_bytes, num_boxes, shape = CUTS[case]

    boxes = cut_into_boxes(
        share, FULL, (0, num_tokens), order=canonical_order(), box_bytes=box_bytes
    )

    assert len(boxes) == num_boxes
    assert {(len(box.layers), box.stop - box.start) for box in boxes} == {shape} - {None}


def test_a_slot_that_holds_less_than_a_block_of_one_layer_is_filled_all_the_same() -> None:
    boxes = _cut(17, 4 * 2048)

    assert len(boxes) == 17 * 16 / 4
    assert {slot_bytes(FULL, box, canonical_order()) for box in boxes} == {4 * 2048}


@pytest.mark.parametrize(
    ("order", "needed", "what"),
    [
        (canonical_order(), 2048, "one token of one layer"),
        (SlotOrder(canonical_order().axes, 16), 32768, "one block of 16 tokens of one layer"),
    ],
    ids=["canonical", "readers_order"],
)
def test_a_slot_too_small_for_the_least_box_is_refused_with_what_to_raise(
    order: SlotOrder, needed: int, what: str
) -> None:
    with pytest.raises(GeometryError, match=what) as refused:
        _cut(100, needed - 1, order)

    assert refused.value.code is ErrorCode.GEOMETRY
    assert refused.value.detail == {
        "field": "slot_bytes",
        "needed_bytes": needed,
        "given_bytes": needed - 1,
    }
    assert f"has {needed - 1}: raise slot_bytes to {needed}" in refused.value.message
    assert len(_cut(1, needed, order)) == 16


def test_a_state_is_cut_between_layers_only() -> None:
    group = state_group("state", (1, 3, 5), (StatePart("ssm", 4, 100),))
    share = Share(0, 0, "state", (1, 3, 5), ("ssm",), 2, 2)

    boxes = cut_into_boxes(share, group, (0, 1), order=canonical_order(), box_bytes=450)

    assert boxes == (
        Box("state", (1,), ("ssm",), 2, 2, 0, 1),
        Box("state", (3, 5), ("ssm",), 2, 2, 0, 1),
    )


def _regions(text: str, *, cross_layer: bool = False) -> tuple[Region, ...]:
    engine = EngineSpec("e", "m", 2, (FULL,))
    layout = KvLayout.parse(text, cross_layer=cross_layer)
    return lay_out_rank(engine, 1, layout, num_blocks=4).regions


@pytest.mark.parametrize(
    ("text", "cross_layer", "expected"),
    [
        ("NHD", False, "layer block kv token head dim"),
        ("HND", False, "layer block kv head token dim"),
        ("NHD", True, "block layer kv token head dim"),
        ("kv,block,token,head,dim", False, "layer kv block token head dim"),
    ],
)
def test_a_readers_order_is_that_of_its_regions_with_what_lies_apart_outermost(
    text: str, cross_layer: bool, expected: str
) -> None:
    order = reader_order(_regions(text, cross_layer=cross_layer), FULL)

    assert order == SlotOrder(tuple(map(AxisName, expected.split())), 16)


@settings(max_examples=num_examples(100), deadline=None)
@given(st.permutations(list(AxisName)))
def test_in_a_slot_of_the_readers_order_axes_follow_each_other_as_in_its_memory(
    axes: list[AxisName],
) -> None:
    regions = _regions(",".join(axes))

    order = reader_order(regions, FULL)

    assert order
    box = Box("full", FULL.layers, FULL.parts, 4, 4, 0, 64)
    slot = slot_region(FULL, box, order)
    assert slot.axes == regions[0].axes


def test_an_axis_of_one_index_does_not_count_wherever_it_lies() -> None:
    mla = GroupSpec("full", (0, 1), 16, 1, 576, "bfloat16", ("latent",))
    engine = EngineSpec("e", "m", 1, (mla,))
    orders = {
        reader_order(lay_out_rank(engine, 0, layout, num_blocks=4).regions, mla)
        for layout in map(KvLayout.parse, ("NHD", "HND", "head,block,token,dim,kv"))
    }

    assert len(orders) == 1


def test_regions_of_two_orders_have_none() -> None:
    regions = _regions("NHD")[:8] + _regions("HND")[8:]

    assert reader_order(regions, FULL) is None
    assert reader_order((), FULL) is None


def test_regions_that_lack_an_axis_agree_with_those_that_have_it() -> None:
    first, *rest = _regions("NHD")
    halves = [
        msgspec.structs.replace(
            first,
            parts=(part,),
            offset_bytes=first.offset_bytes + index * first.stride_bytes(AxisName.KV),
            axes=tuple(axis for axis in first.axes if axis.name is not AxisName.KV),
        )
        for index, part in enumerate(first.parts)
    ]

    order = reader_order((*halves, *rest), FULL)

    assert order == reader_order(_regions("NHD"), FULL)
