"""The table of what engines hand off is as old as the marks of tests, and the refusals."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_of_kinds_is_up_to_date() -> None:
    page = runpy.run_path(str(DOCS / "generate_kinds.py"))["page"]()
    written = (DOCS / "engine-support.md").read_text()
    assert written == page, "stale: run python docs/generate_kinds.py"
