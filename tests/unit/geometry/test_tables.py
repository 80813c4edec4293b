"""The block tables that a fetch may have; those of offers are in
`tests/unit/prefill/test_tables.py`."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.errors import GeometryError
from kvbus.geometry import (
    BlockTable,
    EngineSpec,
    GroupSpec,
    StatePart,
    check_fetched,
    check_readable,
    state_group,
)

NUM_BLOCKS = 8
FULL = GroupSpec("full", (0,), 4, 2, 8, "bfloat16")
WINDOW = GroupSpec("window", (1,), 4, 2, 8, "bfloat16", window=6)
STATE = state_group("state", (2,), (StatePart("conv", 1, 64),))
OPTIONAL = state_group("optional", (3,), (StatePart("row", 1, 64),), optional=True)
ENGINE = EngineSpec("engine", "model", 1, (FULL, WINDOW, STATE, OPTIONAL))
TABLES = {
    "full": BlockTable.of([3, 1], first_block=1),
    "window": BlockTable.of([0, 7], first_block=1),
    "state": BlockTable.of([5]),
    "optional": BlockTable.of([2]),
}
"""Those of tokens 5 to 11."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"optional": BlockTable.of([])}, ""),
        ({"state": BlockTable.of([])}, "need 1 blocks"),
        ({"state": BlockTable.of([5, 6])}, "the table has 2"),
        ({"full": BlockTable.of([3, 1])}, "from block 1 on, the table has 2 from block 0"),
        ({"window": BlockTable.of([0, 0], first_block=1)}, "twice"),
        ({"window": BlockTable.of([0, 8], first_block=1)}, "block id 8 is out of range"),
        ({"optional": BlockTable(b"\1")}, "the table has 0"),
        ({"other": BlockTable.of([])}, "tables are of groups"),
    ],
)
def test_a_fetch_has_the_blocks_of_its_tokens(changes: dict[str, BlockTable], words: str) -> None:
    tables = {**TABLES, **changes}
    with pytest.raises(GeometryError, match=words) if words else nullcontext():
        check_fetched(ENGINE, tables, 5, 11, num_blocks=lambda _: NUM_BLOCKS)


def test_a_fetch_has_a_table_of_every_group() -> None:
    for group in TABLES:
        tables = {name: table for name, table in TABLES.items() if name != group}
        with pytest.raises(GeometryError, match="tables are of groups"):
            check_fetched(ENGINE, tables, 5, 11, num_blocks=lambda _: NUM_BLOCKS)


def test_a_fetch_of_no_tokens_may_still_read_states() -> None:
    engine = replace(ENGINE, groups=(STATE,))
    for tokens, ids, is_right in ((11, [5], True), (11, [], True), (0, [5], False), (0, [], True)):
        tables = {"state": BlockTable.of(ids)}
        with nullcontext() if is_right else pytest.raises(GeometryError):
            check_fetched(engine, tables, tokens, tokens, num_blocks=lambda _: NUM_BLOCKS)


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(0, 4), st.integers(0, 16))
def test_a_readable_table_holds_all_positions(ids: list[int], first: int, stop: int) -> None:
    held = range(4 * first, 4 * (first + len(ids)))
    is_readable = set(range(2, stop)) <= set(held) and max(ids, default=0) < NUM_BLOCKS
    table = BlockTable.of(ids, first_block=first)
    with nullcontext() if is_readable else pytest.raises(GeometryError):
        check_readable(FULL, table, (2, max(2, stop)), num_blocks=NUM_BLOCKS)
