"""The page on the protocol says what the structs say, and its worked examples are true."""

import json
import re

import numpy as np
import pytest

from docs import generate_protocol
from docs.generate_protocol import PAGE, WORDS, Undocumented, documented, page
from kvbus.conform.rules import RULES
from kvbus.geometry import BlockTable
from tests.protocol.strategies import MESSAGES
from tests.vectors.generate import FOLDER

TEXT = PAGE.read_text()
EXAMPLE_STRIDES = re.findall(r"^\| ([^|]+) \| ((?:\w+ \d+, )+\w+ \d+) \| ([\d, ]+) \|$", TEXT, re.M)


def test_the_tables_are_what_the_structs_say_today() -> None:
    assert page(TEXT) == TEXT, "stale: run python docs/generate_protocol.py"


def test_every_message_is_on_the_page() -> None:
    assert {kind.__name__ for kind in MESSAGES} <= set(documented())


def test_nothing_is_explained_that_does_not_exist() -> None:
    lists = {"messages", "refusals", "codes", "remedies"}

    assert set(WORDS) - lists <= set(documented())
    assert set(WORDS["messages"]) | set(WORDS["refusals"]) <= set(documented())


@pytest.mark.parametrize(
    ("section", "key"), [("Claim", "offer_id"), ("codes", "busy"), ("remedies", "stale")]
)
def test_a_field_or_code_without_a_meaning_is_refused(
    section: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = {name: word for name, word in WORDS[section].items() if name != key}
    monkeypatch.setitem(generate_protocol.WORDS, section, lacking)

    with pytest.raises(Undocumented, match=key):
        page(TEXT)


def test_a_meaning_without_a_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generate_protocol.WORDS, "Claim", WORDS["Claim"] | {"gone": "x"})

    with pytest.raises(Undocumented, match="gone"):
        page(TEXT)


@pytest.mark.parametrize("name", [PAGE.name, "minimal-engine.md", "geometry.md"])
def test_every_link_of_a_page_leads_to_a_heading(name: str) -> None:
    text = (PAGE.parent / name).read_text()
    links = re.findall(r"\]\(([\w./-]*)(?:#([^)]+))?\)", text)
    for page_name, anchor in links:
        linked = PAGE.parent / (page_name or name)
        assert linked.exists(), page_name
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
            assert anchor in anchors, f"{page_name}#{anchor}"

    assert links


def test_both_pages_say_where_ids_start_and_conform_links_to_it() -> None:
    words = "`id` starts at random, below 2^53"
    anchor = RULES["requests.ids"].anchor
    sections = re.split(r"^#+ (.+)$", TEXT, flags=re.M)
    (section,) = [
        text
        for heading, text in zip(sections[1::2], sections[2::2], strict=True)
        if heading.lower().replace(" ", "-") == anchor
    ]

    assert words in section
    assert words in (PAGE.parent / "minimal-engine.md").read_text()


def test_the_page_says_that_agents_have_keys_and_where_more_of_it_is() -> None:
    last = TEXT.rpartition("\n## ")[2]

    assert last.startswith("Security")
    assert "no authentication" not in TEXT
    assert "](security.md)" in last


def test_the_attach_message_on_the_page_is_the_golden_vector() -> None:
    rows = re.findall(r"^\| `((?:[0-9a-f]{2} ?)+)` \|", TEXT, re.M)
    vectors = json.loads((FOLDER / "attach.json").read_text())
    frame = next(vector["frame"] for vector in vectors if vector["name"] == "PassSegment")

    assert "".join(rows).replace(" ", "") == frame


def test_the_block_table_on_the_page_is_what_travels() -> None:
    assert BlockTable.of([7, 300, 70_000]).ids.hex(" ") in TEXT


@pytest.mark.parametrize("example", EXAMPLE_STRIDES, ids=lambda example: example[0])
def test_the_strides_on_the_page_are_those_of_an_array_of_that_shape(
    example: tuple[str, str, str],
) -> None:
    _, axes, strides = example
    shape = tuple(int(axis.split()[1]) for axis in axes.split(", "))

    array = np.empty(shape, dtype=np.uint16)

    assert array.strides == tuple(int(stride) for stride in strides.split(","))


def test_the_page_has_the_examples() -> None:
    assert len(EXAMPLE_STRIDES) == 5
