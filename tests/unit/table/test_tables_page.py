"""The page of state machines is as old as their tables, which the tests of all tables enforce."""

import runpy
from pathlib import Path

from kvbus_decode.fetch import events
from kvbus_decode.fetch.entry import FetchState
from kvbus_decode.fetch.table import FetchTable

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_state_machines_is_up_to_date() -> None:
    written = (DOCS / "internals" / "tables.md").read_text()
    generated = runpy.run_path(str(DOCS / "generate_tables.py"))["page"]()
    assert written == generated, "stale: run python docs/generate_tables.py"


def test_no_handler_may_leave_the_states_of_its_row() -> None:
    row = FetchTable.transitions[FetchState.READING, events.StepFailed]
    assert row.to == (FetchState.RETRYING, FetchState.DRAINING)
    assert hasattr(row.handler, "__wrapped__"), "tests.support.moves checks it"
