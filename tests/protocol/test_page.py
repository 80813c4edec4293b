"""The page on the protocol says what the structs say, and its worked examples are true."""

import json
import re

import numpy as np
import pytest

from docs import generate_protocol
from docs.generate_protocol import PAGE, WORDS, Undocumented, documented, page
from kvbus.geometry import BlockTable
from tests.protocol.strategies import MESSAGES
from tests.vectors.golden import FOLDER

TEXT = PAGE.read_text()
EXAMPLE_STRIDES = re.findall(r"^\| ([^|]+) \| ((?:\w+ \d+, )+\w+ \d+) \| ([\d, ]+) \|$", TEXT, re.M)


def test_the_tables_are_what_the_structs_say_today_and_name_every_message() -> None:
    lists = {"messages", "refusals", "codes", "remedies"}
    explained = {*WORDS, *WORDS["messages"], *WORDS["refusals"]}

    assert page(TEXT) == TEXT, "stale: run python docs/generate_protocol.py"
    assert {kind.__name__ for kind in MESSAGES} <= set(documented())
    assert explained - lists <= set(documented()), "nothing is explained that does not exist"


@pytest.mark.parametrize(
    ("section", "gone", "added"),
    [
        ("Claim", "offer_id", {}),
        ("codes", "busy", {}),
        ("remedies", "stale", {}),
        ("Claim", "gone", {"gone": "x"}),
    ],
)
def test_a_field_without_a_meaning_or_a_meaning_without_a_field_is_refused(
    section: str, gone: str, added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {name: word for name, word in WORDS[section].items() if name != gone}
    monkeypatch.setitem(generate_protocol.WORDS, section, words | added)

    with pytest.raises(Undocumented, match=gone):
        page(TEXT)


@pytest.mark.parametrize("name", [PAGE.name, "minimal-engine.md", "geometry.md"])
def test_every_link_of_a_page_leads_to_a_heading(name: str) -> None:
    links = re.findall(r"\]\(([\w./-]*)(?:#([^)]+))?\)", (PAGE.parent / name).read_text())

    for page_name, anchor in links:
        linked = PAGE.parent / (page_name or name)
        assert linked.exists(), page_name
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
        anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not anchor or anchor in anchors, f"{page_name}#{anchor}"
    assert links


def test_the_frames_of_the_examples_are_what_travels() -> None:
    rows = re.findall(r"^\| `((?:[0-9a-f]{2} ?)+)` \|", TEXT, re.M)
    vectors = json.loads((FOLDER / "attach.json").read_text())
    attached = next(vector["frame"] for vector in vectors if vector["name"] == "PassSegment")

    assert "".join(rows).replace(" ", "") == attached
    assert BlockTable.of([7, 300, 70_000]).ids.hex(" ") in TEXT


def test_the_strides_on_the_page_are_those_of_arrays_of_that_shape() -> None:
    for name, axes, strides in EXAMPLE_STRIDES:
        shape = tuple(int(axis.split()[1]) for axis in axes.split(", "))
        array = np.empty(shape, dtype=np.uint16)
        assert array.strides == tuple(map(int, strides.split(","))), name
    assert len(EXAMPLE_STRIDES) == 5
