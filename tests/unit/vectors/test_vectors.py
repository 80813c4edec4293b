"""The wire is the golden vectors: every message has one, and each says the bytes of today."""

import hashlib
import json
from base64 import b64encode
from typing import Any

import msgpack
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from docs.generate_schema import schema
from kvbus import protocol as wire
from kvbus.errors import ErrorCode
from kvbus.memory.attach import LENGTH_BYTES, decode_body, decode_length
from tests.unit.vectors.generate import files
from tests.unit.vectors.golden import FOLDER, KINDS, body_in, frame_of, read, rooms

SCHEMA: dict[str, Any] = json.loads(schema())
VECTORS = [vector for room in rooms() for vector in read(room)]


def named(vector: dict[str, Any]) -> str:
    return "-".join([vector["kind"], vector["name"], *str(vector["message"].get("op", "")).split()])


def names(kinds: Any) -> set[str]:
    return {kind.__name__ for kind in kinds}


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [vector for vector in VECTORS if vector["kind"] == kind]


def test_the_files_are_what_the_generator_writes_today() -> None:
    texts = dict(files())
    assert {path.name for path in FOLDER.glob("*.json")} == set(texts)
    for name, text in texts.items():
        assert (FOLDER / name).read_text() == text, "stale: see tests.unit.vectors.generate"


@pytest.mark.parametrize("vector", VECTORS, ids=named)
def test_frame_is_typed_message_of_its_vector_and_in_schema(vector: dict[str, Any]) -> None:
    frame, message = bytes.fromhex(vector["frame"]), vector["message"]
    packed, definition = msgpack.packb(message), SCHEMA["$defs"][vector["name"]]

    if vector["kind"] == "attach":
        assert decode_length(frame[:LENGTH_BYTES]) == len(packed)
        assert frame[LENGTH_BYTES:] == packed
        body = body_in(decode_body(packed))
    else:
        envelope = wire.decode(frame)
        assert frame == packed
        assert envelope.boot == message["boot"]
        body = body_of(envelope)

    typed: wire.Message = wire.from_body(KINDS[vector["name"]], body)
    assert frame == frame_of(vector)
    assert body == body_in(message)
    assert msgpack.packb(wire.to_body(typed)) == msgpack.packb(body)
    assert set(body) <= set(definition["properties"])
    Draft202012Validator({**definition, "$defs": SCHEMA["$defs"]}).validate(in_json(body))


def in_json(value: Any) -> Any:
    """Return the value as the schema has it: bytes are base64 text."""
    if isinstance(value, dict):
        return {name: in_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [in_json(one) for one in value]
    return b64encode(value).decode() if isinstance(value, bytes) else value


def body_of(envelope: wire.RequestFrame | wire.Reply | wire.Notice) -> Any:
    if isinstance(envelope, wire.Reply):
        return envelope.ok if envelope.error is None else envelope.error
    return envelope.body


def test_the_schema_has_the_bodies_of_every_operation() -> None:
    asked = {op for room in SCHEMA["x-requests"].values() for op in room}
    shown = {v["message"]["op"] for v in VECTORS if "op" in v["message"] and "topic" not in v}
    assert asked | set(SCHEMA["x-notices"]) == shown
    assert set(SCHEMA["x-events"]) == set(wire.EVENTS)
    assert set(SCHEMA["x-notices"]) == set(wire.NOTICES)


def test_every_message_reply_event_and_error_code_has_a_vector() -> None:
    on_unix = [
        *wire.REQUESTS[wire.Socket.ATTACH].values(),
        *wire.REQUESTS[wire.Socket.MEMORY].values(),
    ]
    others = {kind for kinds in wire.REQUESTS.values() for kind in kinds.values()} - set(on_unix)
    replies = {(v["answers"], v["name"]) for v in VECTORS if "answers" in v}
    codes = {v["message"]["error"]["code"] for v in VECTORS if "error" in v["message"]}

    assert {vector["name"] for vector in VECTORS} == set(KINDS)
    attached = {vector["name"] for vector in of_kind("attach")}
    assert names([*on_unix, *(kind.reply for kind in on_unix)]) <= attached
    assert names(others) == {vector["name"] for vector in of_kind("request")}
    assert {(kind.__name__, kind.reply.__name__) for kind in others} == replies
    assert names(wire.NOTICES.values()) == {vector["name"] for vector in of_kind("notice")}
    assert set(wire.EVENTS) == {vector["message"]["op"] for vector in of_kind("event")}
    assert codes == {code.value for code in ErrorCode}


@pytest.mark.parametrize("vector", json.loads((FOLDER / "prompts.json").read_text()))
def test_the_digest_of_a_prompt_is_made_as_the_page_says(vector: dict[str, Any]) -> None:
    ids = b"".join(one.to_bytes(8, "little", signed=True) for one in vector["token_ids"])
    parts = [ids, *(text.encode() for text in vector["conditions"])]
    stream = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    assert hashlib.blake2b(stream, digest_size=16).hexdigest() == vector["prompt_digest"]
