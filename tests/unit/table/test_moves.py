"""The checks of `tests.support.moves`, which all tests of state machines run under."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.table.table import transitions
from kvbus_decode.fetch.table import FetchTable
from tests.support.moves import MoveError, enforce


@pytest.mark.parametrize(
    ("to", "raises", "error"),
    [("b", False, None), ("c", False, MoveError), ("a", True, KeyError), ("b", True, MoveError)],
)
def test_a_handler_that_leaves_the_states_of_its_row_fails(
    to: str, raises: bool, error: type[Exception] | None
) -> None:
    def handler(entry: Any, *_: Any) -> list[Any]:
        entry.state = to
        if raises:
            raise KeyError
        return []

    rows = transitions((("a",), (int,), handler, ("b",)))  # type: ignore[type-var]  # names will do
    enforce(rows)
    entry = SimpleNamespace(state="a")
    if error is None:
        assert rows["a", int].handler(entry, 1, None) == []
    else:
        with pytest.raises(error):
            rows["a", int].handler(entry, 1, None)


def test_handlers_of_the_product_are_checked_here() -> None:
    assert all(hasattr(row.handler, "__wrapped__") for row in FetchTable.transitions.values())
