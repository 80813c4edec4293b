"""A fetch names the blocks of the positions that each group needs, and no others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable
from tests.engine.recording import FULL, SPEC, WINDOW, RecordingDecode


def tables_of(
    block_ids: dict[str, list[int]], *, num_tokens: int, first_token: int = 0
) -> dict[str, BlockTable]:
    session = RecordingDecode()
    session.fetch({}, num_tokens=num_tokens, first_token=first_token, block_ids=block_ids)
    tables: dict[str, BlockTable] = session.sent[-1].tables
    return tables


def test_a_fetch_names_all_blocks_the_windows_tail_and_the_one_block_of_a_state() -> None:
    tables = tables_of({"full": [7, 3, 9], "window": [5, 1, 2], "state": [4]}, num_tokens=40)

    assert tables == {
        "full": BlockTable.of([7, 3, 9]),
        "window": BlockTable.of([5, 1, 2], first_block=7),  # positions 30 to 39
        "state": BlockTable.of([4]),
    }


def test_behind_a_prefix_hit_the_window_starts_no_earlier_than_the_fetch() -> None:
    tables = tables_of({"full": [3], "window": [5, 1], "state": [4]}, num_tokens=40, first_token=35)

    assert tables["full"] == BlockTable.of([3], first_block=2)
    assert tables["window"] == BlockTable.of([5, 1], first_block=8)
    assert tables["state"] == BlockTable.of([4])


@pytest.mark.parametrize("given_ids", [{}, {"full": [], "window": [], "state": []}])
def test_a_fetch_of_nothing_needs_no_blocks_and_may_leave_groups_out(
    given_ids: dict[str, list[int]],
) -> None:
    tables = tables_of(given_ids, num_tokens=40, first_token=40)

    assert {name: len(table) for name, table in tables.items()} == {
        "full": 0,
        "window": 0,
        "state": 0,
    }


def test_a_group_that_is_needed_and_left_out_is_for_the_agent_to_refuse() -> None:
    tables = tables_of({"full": [7, 3, 9], "state": [4]}, num_tokens=40)

    assert tables.keys() == {"full", "state"}


def test_blocks_of_a_group_that_the_engine_has_not_are_refused_at_once() -> None:
    with pytest.raises(GeometryError, match="full2"):
        tables_of({"full2": [1]}, num_tokens=16)


@pytest.mark.parametrize("ids", [[-1], [2**32], [0.5], [[1, 2]]])
def test_ids_that_are_none_are_refused_before_anything_is_sent(ids: list[int]) -> None:
    session = RecordingDecode()

    with pytest.raises(GeometryError):
        session.fetch({}, num_tokens=16, block_ids={"full": np.array(ids)})

    assert not session.sent


@given(st.data())
def test_the_tables_of_any_fetch_cover_exactly_the_positions_of_their_group(
    data: st.DataObject,
) -> None:
    num_tokens = data.draw(st.integers(0, 100))
    first_token = data.draw(st.integers(0, num_tokens))
    wanted = {
        group.name: [
            position
            for position in range(num_tokens)
            if position >= first_token
            and (group.window is None or position >= num_tokens - group.window)
        ]
        for group in (FULL, WINDOW)
    } | {"state": [0] if num_tokens > first_token else []}
    blocks = {
        name: sorted({position // SPEC.group(name).block_size for position in positions})
        for name, positions in wanted.items()
    }

    tables = tables_of(blocks, num_tokens=num_tokens, first_token=first_token)

    for name, numbers in blocks.items():
        table = tables[name]
        assert table.array().tolist() == numbers
        assert [table.first_block + i for i in range(len(table))] == numbers


def test_the_tail_is_zeroed_only_on_demand() -> None:
    session = RecordingDecode()
    for zero_tail in (False, True):
        session.fetch(
            {},
            num_tokens=1,
            block_ids={"full": [1], "window": [1], "state": [1]},
            zero_tail=zero_tail,
        )

    assert [message.zero_tail for message in session.sent] == [False, True]
