"""The page on the protocol says what the structs say, and its worked examples are true."""

import json
import re

import numpy as np

from docs.generate_header import HEADER, header
from docs.generate_protocol import PAGES, pages
from kvbus.geometry import BlockTable
from kvbus.protocol import REQUESTS, Role, Socket
from tests.unit.vectors.golden import FOLDER

TEXT = PAGES[0].read_text()
EXAMPLE_STRIDES = re.findall(r"^\| ([^|]+) \| ((?:\w+ \d+, )+\w+ \d+) \| ([\d, ]+) \|$", TEXT, re.M)


def test_page_tables_match_declarations_and_name_every_message() -> None:
    texts = {path: path.read_text() for path in PAGES}
    heading = re.compile(r"^(?:#### `([a-z_]+)`|Reply, `(\w+)`:)$", re.M)
    shown = {each for text in texts.values() for each in heading.findall(text)}
    replies = {kind.reply for kinds in REQUESTS.values() for kind in kinds.values()}
    assert pages() == texts, "stale: run python docs/generate_protocol.py"
    assert {op for kinds in REQUESTS.values() for op in kinds} <= {op for op, _ in shown}
    assert {kind.__name__ for kind in replies} - {"Empty"} == {name for _, name in shown} - {""}


def test_c_header_matches_declarations() -> None:
    assert HEADER.read_text() == header(), "stale: run python docs/generate_header.py"


def test_a_decode_agent_may_ask_all_that_peers_answer() -> None:
    for socket in (Socket.PREFILL_PEER, Socket.DECODE_PEER):
        for kind in REQUESTS[socket].values():
            assert Role.DECODE in kind.allowed_roles, kind


def test_the_frames_of_the_examples_are_what_travels() -> None:
    rows = re.findall(r"^\| `((?:[0-9a-f]{2} ?)+)` \|", TEXT, re.M)
    vectors = json.loads((FOLDER / "attach.json").read_text())
    attached = next(vector["frame"] for vector in vectors if vector["name"] == "PassSegment")
    assert "".join(rows).replace(" ", "") == attached
    assert BlockTable.of([7, 300, 70_000]).ids.hex(" ") in TEXT


def test_page_strides_match_arrays_of_same_shape() -> None:
    for name, axes, strides in EXAMPLE_STRIDES:
        shape = tuple(int(axis.split()[1]) for axis in axes.split(", "))
        array = np.empty(shape, dtype=np.uint16)
        assert array.strides == tuple(map(int, strides.split(","))), name
    assert len(EXAMPLE_STRIDES) == 5
