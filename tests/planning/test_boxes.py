"""Boxes cover a share once, each fits its slot, and a reader's order is that of its memory."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
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

    def slot_bytes(self, *, num_layers: int, num_positions: int) -> int:
        """Of a box of the share with so many layers, from the beginning of a block on."""
        share = self.share
        heads = (share.first_head, share.num_heads)
        layers = share.layers[:num_layers]
        box = Box(share.group, layers, share.parts, *heads, 0, num_positions)
        return slot_bytes(self.group, box, self.order)


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
    share, order = case.share, case.order

    boxes = cut_into_boxes(share, case.group, case.span, order=order, box_bytes=case.box_bytes)

    assert Counter(product(share.layers, share.parts, range(*case.span))) == Counter(
        element
        for box in boxes
        for element in product(box.layers, box.parts, range(box.start, box.stop))
    )
    assert {(box.group, box.first_head, box.num_heads) for box in boxes} == {
        ("full", share.first_head, share.num_heads)
    }
    assert all(slot_bytes(case.group, box, order) <= case.box_bytes for box in boxes)
    cuts = {edge for box in boxes for edge in (box.start, box.stop)} - set(case.span)
    assert all(cut % order.block_size == 0 for cut in cuts)
    assert len(boxes) <= most_boxes(case)


def most_boxes(case: Case) -> float:
    """What whole layers alone, or cut tokens alone, would take."""
    num_layers, (start, stop) = len(case.share.layers), case.span
    size, unit = case.order.block_size, case.group.block_size * case.order.block_size
    aligned = ceil(stop / size) * size - start // size * size
    layer_bytes = case.slot_bytes(num_layers=1, num_positions=aligned)
    unit_bytes = case.slot_bytes(num_layers=num_layers, num_positions=unit)
    most = inf
    if layer_bytes <= case.box_bytes:
        most = ceil(num_layers / (case.box_bytes // layer_bytes))
    if unit_bytes <= case.box_bytes:
        num_units = ceil(stop / unit) - start // unit
        most = min(most, ceil(num_units / (case.box_bytes // unit_bytes)))
    return most


FULL = GroupSpec("full", tuple(range(16)), 16, 8, 128, "bfloat16")
SHARE = Share(0, 0, "full", FULL.layers, FULL.parts, 4, 4)


@pytest.mark.parametrize(
    ("block_size", "needed", "what"),
    [(1, 2048, "one token of one layer"), (16, 32768, "one block of 16 tokens of one layer")],
)
def test_a_slot_too_small_for_the_least_box_is_refused_with_what_to_raise(
    block_size: int, needed: int, what: str
) -> None:
    order = SlotOrder(canonical_order().axes, block_size)

    with pytest.raises(GeometryError, match=f"{what}.*raise slot_bytes to {needed}") as refused:
        cut_into_boxes(SHARE, FULL, (0, 100), order=order, box_bytes=needed - 1)

    sizes = {"needed_bytes": needed, "given_bytes": needed - 1}
    assert refused.value.detail == {"field": "slot_bytes", **sizes}
    assert len(cut_into_boxes(SHARE, FULL, (0, 1), order=order, box_bytes=needed)) == 16


def test_no_positions_are_no_box_and_a_state_is_cut_between_layers_only() -> None:
    state = state_group("state", (1, 3, 5), (StatePart("ssm", 4, 100),))
    share = Share(0, 0, "state", (1, 3, 5), ("ssm",), 2, 2)

    nothing = cut_into_boxes(SHARE, FULL, (0, 0), order=canonical_order(), box_bytes=1)
    boxes = cut_into_boxes(share, state, (0, 1), order=canonical_order(), box_bytes=450)

    assert not nothing
    assert [(box.layers, box.start, box.stop) for box in boxes] == [((1,), 0, 1), ((3, 5), 0, 1)]


def regions_of(text: str, *, cross_layer: bool = False) -> tuple[Region, ...]:
    layout = KvLayout.parse(text, cross_layer=cross_layer)
    return lay_out_rank(EngineSpec("e", "m", 2, (FULL,)), 1, layout, num_blocks=4).regions


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
    order = reader_order(regions_of(text, cross_layer=cross_layer), FULL)

    assert order == SlotOrder(tuple(map(AxisName, expected.split())), 16)


def test_an_axis_of_one_index_does_not_count_wherever_it_lies() -> None:
    mla = GroupSpec("full", (0, 1), 16, 1, 576, "bfloat16", ("latent",))
    engine = EngineSpec("e", "m", 1, (mla,))
    layouts = map(KvLayout.parse, ("NHD", "HND", "head,block,token,dim,kv"))
    ranks = [lay_out_rank(engine, 0, layout, num_blocks=4) for layout in layouts]

    assert len({reader_order(rank.regions, mla) for rank in ranks}) == 1


def test_regions_of_two_orders_have_none() -> None:
    assert reader_order((*regions_of("NHD")[:8], *regions_of("HND")[8:]), FULL) is None
    assert reader_order((), FULL) is None
