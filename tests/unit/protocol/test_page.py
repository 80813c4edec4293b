"""The protocol pages, the C header and the schema match the declarations; examples are true."""

import os
import re
from typing import Any

import msgpack
import numpy as np
import pytest

from docs import generate_architecture, generate_frames, generate_protocol, generate_schema
from docs.generate_header import HEADER, header
from docs.generate_protocol import PAGES, pages
from hatch_build import add_protocol
from kvbus.geometry import BlockTable
from kvbus.memory.attach import decode_body, decode_length
from kvbus.protocol import REQUESTS, Message, RequestFrame, Role, Socket, decode, from_body

TEXT = PAGES[0].read_text()
EXAMPLE_STRIDES = re.findall(r"^\| ([^|]+) \| ((?:\w+ \d+, )+\w+ \d+) \| ([\d, ]+) \|$", TEXT, re.M)


def test_page_tables_match_declarations_and_name_every_message() -> None:
    texts = {path: path.read_text() for path in PAGES}
    heading = re.compile(r"^(?:#### `([a-z_]+)`|Reply, `(\w+)`:)$", re.M)
    summary = re.compile(r"^- `([a-z_]+)` \(`\w+`(?:, reply `(\w+)`)?\): ", re.M)
    shown = {each for text in texts.values() for each in heading.findall(text)}
    shown |= {each for text in texts.values() for each in summary.findall(text)}
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


def test_schema_matches_declarations() -> None:
    written = generate_schema.PAGE.read_text()
    assert written == generate_schema.schema(), "stale: run python docs/generate_schema.py"


def test_a_message_without_description_stops_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = REQUESTS[Socket.DECODE]["cancel"]
    monkeypatch.setattr(kind, "__doc__", None)

    with pytest.raises(generate_protocol.Undocumented, match="CancelFetch"):
        pages()


def test_frames_of_minimal_engine_page_are_current() -> None:
    text = generate_frames.PAGE.read_text()
    assert text == generate_frames.page(text), "stale: run python docs/generate_frames.py"


def shown_frame(op: str) -> bytes:
    """Return the bytes in the first column of an example on the page."""
    text = generate_frames.PAGE.read_text()
    found = re.search(rf"<!-- generated: {op} -->\n\n```text\n(.*?)```", text, re.S)
    assert found
    return bytes.fromhex("".join(re.findall(r"^[0-9a-f]+", found[1], re.M)))


@pytest.mark.parametrize(("op", "socket"), [("register", Socket.ENGINE), ("offer", Socket.PREFILL)])
def test_shown_frame_is_decoded_as_its_request(op: str, socket: Socket) -> None:
    request = decode(shown_frame(op))

    assert isinstance(request, RequestFrame)
    assert request.op == op
    assert isinstance(from_body(REQUESTS[socket][op], request.body), Message)


def test_shown_segment_is_decoded_as_its_request() -> None:
    frame = shown_frame("segment")
    message: Any = decode_body(frame[4:])

    assert decode_length(frame[:4]) == len(frame) - 4
    assert from_body(REQUESTS[Socket.ATTACH]["segment"], message["body"])


def test_shown_fetch_starts_like_its_request() -> None:
    shown = shown_frame("fetch").partition(msgpack.packb("ticket"))[0]
    message = {"v": 1, "op": "fetch", "id": 8126}

    assert shown.startswith(b"\x86" + msgpack.packb(message)[1:])


def test_block_ids_of_the_page_are_encoded_so() -> None:
    assert BlockTable.of([7, 300, 70_000]).ids.hex(" ") in TEXT


def test_page_strides_match_arrays_of_same_shape() -> None:
    for name, axes, strides in EXAMPLE_STRIDES:
        shape = tuple(int(axis.split()[1]) for axis in axes.split(", "))
        array = np.empty(shape, dtype=np.uint16)
        assert array.strides == tuple(map(int, strides.split(","))), name
    assert len(EXAMPLE_STRIDES) == 2


def test_pictures_of_the_architecture_are_current() -> None:
    made = generate_architecture.pictures()

    assert {path: path.read_text() for path in made} == made, "stale: run make docs"


def test_wheel_has_schema_header_and_vectors() -> None:
    wheel: dict[str, Any] = {"force_include": {}}

    add_protocol(wheel)

    placed = set(wheel["force_include"].values())
    assert {f"kvbus/protocol/{name}" for name in ("protocol.schema.json", "protocol.h")} <= placed
    assert "kvbus/protocol/vectors/engine.json" in placed
    assert all(map(os.path.exists, wheel["force_include"]))
