"""A box is a few strided views: layers that lie evenly are one, and so are whole blocks."""

from itertools import groupby

import msgspec
import numpy as np
import pytest

from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout, Region, lay_out_rank
from kvbus.memory.grids import Grid, find_grids, map_regions
from kvbus.memory.units import SlotSteps, cut_into_units

GROUP = GroupSpec("full", tuple(range(6)), 4, 2, 8, "bfloat16")
ONE_BY_ONE = SlotSteps(block_bytes=32, token_bytes=500, block_size=1, first_block=0)


def _regions(layout: str) -> tuple[Region, ...]:
    engine = EngineSpec("e", "m", 1, (GROUP,))
    return lay_out_rank(engine, 0, KvLayout.parse(layout), num_blocks=8).regions


def _grids(regions: tuple[Region, ...]) -> tuple[Grid, ...]:
    return find_grids(map_regions(regions), GROUP.layers, GROUP.parts, (0, 2))


@pytest.mark.parametrize(
    "layout", ["NHD", "HND", "block,layer,kv,token,head,dim", "kv,block,token,head,dim"]
)
def test_layers_and_parts_at_equal_distances_are_reached_by_one_view(layout: str) -> None:
    grids = _grids(_regions(layout))

    assert [(grid.layers.num, grid.parts.num) for grid in grids] == [(6, 2)]


def test_layers_at_other_distances_than_the_ones_before_are_a_view_of_their_own() -> None:
    regions = tuple(
        msgspec.structs.replace(region, offset_bytes=offset)
        for region, offset in zip(
            _regions("NHD"), (0, 5000, 10_000, 16_000, 22_000, 21_000), strict=True
        )
    )

    grids = _grids(regions)

    runs = [(g.layers.first, g.layers.num, g.layers.step_bytes, g.origin_bytes) for g in grids]
    assert runs == [(0, 3, 5000, 0), (3, 2, 6000, 16_000), (5, 1, 0, 21_000)]


@pytest.mark.parametrize("segments", ["012345", "000111", "ababab"])
def test_layers_next_to_each_other_in_one_segment_are_one_view(segments: str) -> None:
    regions = tuple(
        msgspec.structs.replace(region, segment_id=segment)
        for region, segment in zip(_regions("NHD"), segments, strict=True)
    )

    grids = sorted(_grids(regions), key=lambda grid: grid.layers.first)

    together = [(name, len(list(run))) for name, run in groupby(segments)]
    assert [(grid.steps.segment_id, grid.layers.num) for grid in grids] == together


def _pieces(slot: SlotSteps, start: int, stop: int) -> list[tuple[int, list[int], list[int]]]:
    """Tokens of a unit, and blocks and first tokens of the units; the rank's blocks are of 4."""
    table = BlockTable.of(range(10, 30))
    units = cut_into_units(table, _from(slot, start), start, stop, block_size=4)
    return [(one.num_tokens, one.blocks.tolist(), one.tokens.tolist()) for one in units]


def _from(slot: SlotSteps, start: int) -> SlotSteps:
    return slot._replace(first_block=start // slot.block_size)


def test_whole_blocks_are_one_piece_and_parts_of_the_first_and_last_one_are_apart() -> None:
    assert _pieces(ONE_BY_ONE, 2, 15) == [(2, [10], [2]), (4, [11, 12], [0, 0]), (3, [13], [0])]
    assert _pieces(ONE_BY_ONE, 4, 12) == [(4, [11, 12], [0, 0])]
    assert _pieces(ONE_BY_ONE, 5, 7) == [(2, [11], [1])]


def test_units_of_a_slot_whose_blocks_lie_apart_are_of_both_block_sizes() -> None:
    slot = SlotSteps(block_bytes=1000, token_bytes=32, block_size=6, first_block=0)

    pieces = _pieces(slot, 0, 24)

    assert {size for size, _, _ in pieces} == {2}
    assert len(pieces) == 3


@pytest.mark.parametrize(("block_size", "num_pieces"), [(8, 2), (40, 2)])
def test_units_go_together_by_block_or_by_place_in_a_block_whichever_is_fewer(
    block_size: int, num_pieces: int
) -> None:
    slot = SlotSteps(block_bytes=4000, token_bytes=32, block_size=block_size, first_block=0)

    pieces = _pieces(slot, 0, 64)

    assert len(pieces) == num_pieces
    assert sorted(np.concatenate([blocks for _, blocks, _ in pieces])) == list(range(10, 26))
