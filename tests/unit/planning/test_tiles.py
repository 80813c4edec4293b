"""Tiles cover a share once, each fits its slot, however they are cut."""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import GroupSpec, StatePart, Tile, slot_bytes, state_group
from kvbus.planning import Share, cut_into_tiles
from tests.support.examples import num_examples


@dataclass(frozen=True)
class Case:
    share: Share
    group: GroupSpec
    span: tuple[int, int]
    tile_bytes: int

    def slot_bytes(self, *, num_layers: int, num_positions: int) -> int:
        """The size of a tile with so many layers, from the beginning of a block on."""
        share, layers = self.share, self.share.layers[:num_layers]
        heads = (share.first_head, share.num_heads)
        return slot_bytes(
            self.group, Tile(share.group, layers, share.parts, *heads, 0, num_positions)
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A share of some layers, parts and heads, and a slot that holds at least one token."""
    layers = draw(st.permutations([0, 1, 2, 5, 7]))
    group = GroupSpec("full", tuple(layers), draw(st.integers(1, 6)), 4, 3, "float16")
    first_head = draw(st.integers(0, 3))
    parts = draw(st.sampled_from([("k", "v"), ("v",)]))
    held = tuple(layers[: draw(st.integers(1, 5))])
    heads = first_head, draw(st.integers(1, 4 - first_head))
    share = Share(0, 0, "full", held, parts, *heads)
    start = draw(st.integers(0, 20))
    span = (start, start + draw(st.integers(1, 40)))
    least = len(share.parts) * share.num_heads * 3 * 2
    return Case(share, group, span, least + draw(st.integers(0, 60 * least)))


@settings(max_examples=num_examples(600), deadline=None)
@given(cases())
def test_tiles_are_few_fit_slots_and_hold_each_element_once(case: Case) -> None:
    share = case.share
    tiles = cut_into_tiles(share, case.group, case.span, tile_bytes=case.tile_bytes)
    assert Counter(product(share.layers, share.parts, range(*case.span))) == Counter(
        element
        for tile in tiles
        for element in product(tile.layers, tile.parts, range(tile.start, tile.stop))
    )
    assert {(tile.group, tile.first_head, tile.num_heads) for tile in tiles} == {
        ("full", share.first_head, share.num_heads)
    }
    assert all(slot_bytes(case.group, tile) <= case.tile_bytes for tile in tiles)
    assert len(tiles) <= most_tiles(case)


def most_tiles(case: Case) -> float:
    """The tiles that whole layers alone, or cut tokens alone, need."""
    num_layers, (start, stop) = len(case.share.layers), case.span
    unit = case.group.block_size
    layer_bytes = case.slot_bytes(num_layers=1, num_positions=stop - start)
    unit_bytes = case.slot_bytes(num_layers=num_layers, num_positions=unit)
    most = inf
    if layer_bytes <= case.tile_bytes:
        most = ceil(num_layers / (case.tile_bytes // layer_bytes))
    if unit_bytes <= case.tile_bytes:
        num_units = ceil(stop / unit) - start // unit
        most = min(most, ceil(num_units / (case.tile_bytes // unit_bytes)))
    return most


FULL = GroupSpec("full", tuple(range(16)), 16, 8, 128, "bfloat16")
SHARE = Share(0, 0, "full", FULL.layers, FULL.parts, 4, 4)


def test_slot_below_least_tile_is_refused_with_setting_to_raise() -> None:
    with pytest.raises(GeometryError, match=r"one token .*raise slot_bytes to 2048") as refused:
        cut_into_tiles(SHARE, FULL, (0, 100), tile_bytes=2047)
    sizes = {"needed_bytes": 2048, "given_bytes": 2047}
    assert refused.value.detail == {"field": "slot_bytes", **sizes}
    assert len(cut_into_tiles(SHARE, FULL, (0, 1), tile_bytes=2048)) == 16


def test_no_positions_make_no_tile_and_states_are_cut_by_layer() -> None:
    state = state_group("state", (1, 3, 5), (StatePart("ssm", 4, 100),))
    share = Share(0, 0, "state", (1, 3, 5), ("ssm",), 2, 2)
    nothing = cut_into_tiles(SHARE, FULL, (0, 0), tile_bytes=1)
    tiles = cut_into_tiles(share, state, (0, 1), tile_bytes=450)
    assert not nothing
    assert [(one.layers, one.start, one.stop) for one in tiles] == [((1,), 0, 1), ((3, 5), 0, 1)]
