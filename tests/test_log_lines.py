"""The page of log lines has each line that the code logs, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference.md"
LOGGED = re.compile(r'\b(?:log(?:ger)?\.\w+|level)\(\s*"([a-z]+\.[a-z_]+)"')
ENDS = {"handoff.completed", "handoff.failed", "handoff.cancelled"}
"""Of one line, whose name is made of the outcome."""


def test_the_page_has_each_line_that_is_logged_and_no_other() -> None:
    files = [*ROOT.glob("kvbus/**/*.py"), *ROOT.glob("services/**/*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    rows = re.findall(r"^\| (`[a-z]+\.[^|]*)\|", PAGE.read_text(encoding="utf-8"), re.M)

    told = {name for row in rows for name in re.findall(r"`([a-z]+\.[a-z_]+)`", row)}

    assert set(LOGGED.findall(code)) - told == set()
    assert {name for name in told - ENDS if f'"{name}"' not in code} == set()
