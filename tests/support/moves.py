"""Handlers of state machines that may not leave the states that their row of the table allows.

`enforce` replaces the handlers of a table of transitions, for the whole process: the product itself
checks nothing.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvbus.table.table import Transition

Handler = Callable[..., list[Any]]


class MoveError(AssertionError):
    """A handler has moved its entry to a state that its row does not name, or moved and raised."""


def enforce(rows: Any, *, moved: int = 0) -> None:
    """Check each handler of ``rows``; ``moved`` is the position of the argument that it moves."""
    for key, row in list(rows.items()):
        if not hasattr(row.handler, "__wrapped__"):
            rows[key] = Transition(_checked(row.handler, row.to, moved), row.to)


def _checked(handler: Handler, to: tuple[Any, ...], moved: int) -> Handler:
    @wraps(handler)
    def checked(*args: Any) -> list[Any]:
        entry = args[moved]
        before = entry.state
        try:
            commands = handler(*args)
        except Exception as error:
            if entry.state is not before:
                raise MoveError(f"{handler.__name__} raised in {entry.state}") from error
            raise
        if entry.state not in to:
            names = ", ".join(to)
            moves = f"{before} -> {entry.state}"
            raise MoveError(f"{handler.__name__}: {moves}, which is not in {names}")
        return commands

    return checked


def enforce_all() -> None:
    from kvbus_decode.fetch.table import FetchTable
    from kvbus_decode.read_table import TRANSITIONS as OF_TRANSFERS
    from kvbus_prefill.offer.table import OfferTable
    from kvbus_prefill.slot_table import SlotTable

    for table in (FetchTable, OfferTable, SlotTable):
        enforce(table.transitions)
    enforce(OF_TRANSFERS, moved=1)
