"""The page of keys, log lines and metrics has all that the code has, and nothing else."""

import re
from pathlib import Path

from docs.generate_reference import PAGE, page

ROOT = Path(__file__).parents[2]
LOGGED = re.compile(r'\b(?:log(?:ger)?\.\w+|level|lines\.write)\(\s*"([a-z]+\.[a-z_]+)"')
ENDS = {"handoff.completed", "handoff.failed", "handoff.cancelled"}
"""Names of one line, which the code makes of the outcome."""


def test_keys_and_metrics_of_page_match_code() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "stale: run make docs"


def test_the_page_has_each_line_that_is_logged_and_no_other() -> None:
    files = [*ROOT.glob("kvbus/**/*.py"), *ROOT.glob("services/**/*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    logs = PAGE.read_text(encoding="utf-8").partition("## Logs\n")[2].partition("## Metrics\n")[0]
    items = re.findall(r"^- (`[a-z]+\.[^:]*):", logs, re.M)

    told = {name for item in items for name in re.findall(r"`([a-z]+\.[a-z_]+)`", item)}

    assert set(LOGGED.findall(code)) - told == set()
    assert {name for name in told - ENDS if f'"{name}"' not in code} == set()
