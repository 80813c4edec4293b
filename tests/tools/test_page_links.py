"""Links of one page of the project to another lead there, to the heading that they name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", "deploy/**/*.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)#?([^)\s]*)\)")


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
        is_there = there.exists() and (not heading or heading in headings(there))
        lost += [] if is_there else [f"{path}#{heading}"]

    assert not lost
