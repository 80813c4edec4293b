"""vLLM's block ids as tables of a handoff."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, GroupSpec
from kvbus.integrations.vllm.block_tables import NULL_BLOCK, tables_of
from tests.expected import positions

FULL = GroupSpec("full", (0,), 16, 4, 8, "bfloat16")
WINDOW = GroupSpec("window", (1,), 4, 4, 8, "bfloat16", window=10)
ENGINE = EngineSpec("engine", "model", 1, (FULL, WINDOW))


def blocks_of(group: GroupSpec, num_tokens: int) -> list[int]:
    """Ids as vLLM gives them: from the request's start, and unlike their places."""
    return [100 + number for number in range(-(-num_tokens // group.block_size))]


@given(st.integers(0, 80), st.integers(0, 80))
def test_tables_hold_the_blocks_of_the_tokens_that_are_needed(one: int, other: int) -> None:
    first, stop = sorted((one, other))
    ids = [blocks_of(group, stop) for group in ENGINE.groups]

    tables = tables_of(ENGINE, ids, first, stop)

    for group, given_ids in zip(ENGINE.groups, ids, strict=True):
        needed = sorted({at // group.block_size for at in positions(group, first, stop)})
        assert tables.block_ids.get(group.name, []) == [given_ids[block] for block in needed]
        assert tables.first_blocks.get(group.name) == (needed[0] if needed else None)


def test_blocks_that_a_window_has_left_behind_may_be_null() -> None:
    window = [NULL_BLOCK] * 7 + [3, 4, 5]

    tables = tables_of(ENGINE, [blocks_of(FULL, 40), window], 0, 40)

    assert tables.block_ids["window"] == [3, 4, 5]
    assert tables.first_blocks["window"] == 7


def test_a_null_block_where_kv_is_needed_is_refused() -> None:
    window = [NULL_BLOCK] * 8 + [4, 5]

    with pytest.raises(GeometryError, match=r"group 'window'.*blocks 7 to 10"):
        tables_of(ENGINE, [blocks_of(FULL, 40), window], 0, 40)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(GeometryError, match="group 'full': vLLM keeps 2 blocks"):
        tables_of(ENGINE, [[1, 2], blocks_of(WINDOW, 40)], 0, 40)
