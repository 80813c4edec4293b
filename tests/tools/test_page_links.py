"""Links of the project's pages lead to a file and its heading, and files that pages name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "kvbus", "services", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(one for name in FOLDERS for one in ROOT.glob(f"{name}/**/*.md"))]
)
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)#?([^)\s]*)\)")
THEMES = ("gh-light-mode-only", "gh-dark-mode-only")
"""Fragments of pictures for one theme."""


def headings(page: Path) -> set[str]:
    """What headings are called in links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    found = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one) for one in found)
    named = {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in plain}
    return named | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = set(LINK.findall(page.read_text(encoding="utf-8")))

    lost = []
    for path, heading in links:
        there = (page.parent / path).resolve() if path else page
        has_heading = not heading or heading in THEMES or heading in headings(there)
        is_there = there.exists() and has_heading
        lost += [] if is_there else [f"{path}#{heading}"]

    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))

    assert not {name for name in named if not (ROOT / name).exists()}
