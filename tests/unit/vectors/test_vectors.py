"""The wire is the golden vectors: every message has one, and each says the bytes of today."""

import hashlib
import json
from typing import Any

import msgpack
import pytest

from docs.generate_schema import schema
from kvbus.errors import ErrorCode
from kvbus.geometry import validate_rank, validate_ranks
from kvbus.memory.attach import LENGTH_BYTES, decode_body, decode_length
from kvbus.protocol import (
    EVENTS,
    NOTICES,
    REQUESTS,
    Message,
    Notice,
    Register,
    Reply,
    RequestFrame,
    Socket,
    decode,
    from_body,
    to_body,
)
from tests.unit.vectors.generate import files
from tests.unit.vectors.golden import FOLDER, KINDS, body_in, frame_of, read, rooms

SCHEMA: dict[str, Any] = json.loads(schema())
VECTORS = [vector for room in rooms() for vector in read(room)]
END_OF_FIRST_IDS = 2**53


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
        assert (FOLDER / name).read_text() == text, (
            f"{name} is stale: see tests.unit.vectors.generate"
        )


@pytest.mark.parametrize("vector", VECTORS, ids=named)
def test_frame_is_typed_message_of_its_vector_and_in_schema(
    vector: dict[str, Any],
) -> None:
    frame, message = bytes.fromhex(vector["frame"]), vector["message"]
    packed, definition = msgpack.packb(message), SCHEMA["$defs"][vector["name"]]

    if vector["kind"] == "attach":
        assert decode_length(frame[:LENGTH_BYTES]) == len(packed)
        assert frame[LENGTH_BYTES:] == packed
        body = body_in(decode_body(packed))
    else:
        envelope = decode(frame)
        assert frame == packed
        assert envelope.boot == message["boot"]
        body = body_of(envelope)

    typed: Message = from_body(KINDS[vector["name"]], body)
    assert frame == frame_of(vector)
    assert body == body_in(message)
    assert msgpack.packb(to_body(typed)) == msgpack.packb(body)
    assert set(body) <= set(definition["properties"])
    assert set(definition.get("required", ())) <= set(body)


def body_of(envelope: RequestFrame | Reply | Notice) -> Any:
    if isinstance(envelope, Reply):
        return envelope.ok if envelope.error is None else envelope.error
    return envelope.body


def test_the_schema_has_the_bodies_of_every_operation() -> None:
    asked = {op for room in SCHEMA["x-requests"].values() for op in room}
    shown = {v["message"]["op"] for v in VECTORS if "op" in v["message"] and "topic" not in v}

    assert asked | set(SCHEMA["x-notices"]) == shown
    assert set(SCHEMA["x-events"]) == set(EVENTS)
    assert set(SCHEMA["x-notices"]) == set(NOTICES)


def test_sessions_of_engine_register_it_alike_under_own_boot_ids() -> None:
    registers = [v["message"] for v in VECTORS if v["name"] == "Register"][1:]
    bodies = [from_body(Register, each["body"]) for each in registers]
    ranks = [body.rank for body in bodies if body.rank is not None]

    assert len({each["boot"] for each in registers}) == len(bodies) == 3
    assert len({body.engine for body in bodies}) == 1
    validate_ranks(bodies[0].engine, ranks)
    for rank in ranks:
        validate_rank(bodies[0].engine, rank)


def test_a_request_is_as_a_session_sends_it() -> None:
    requests = [vector["message"] for vector in of_kind("request")]
    secrets = {message["boot"]: message["secret"] for message in requests}

    assert len(set(secrets.values())) == len(secrets)
    assert not set(secrets.values()) & secrets.keys()
    assert {message["secret"] == secrets[message["boot"]] for message in requests} == {True}
    assert all(0 < message["id"] < END_OF_FIRST_IDS for message in requests)


def test_every_message_reply_event_and_error_code_has_a_vector() -> None:
    on_unix = [*REQUESTS[Socket.ATTACH].values(), *REQUESTS[Socket.MEMORY].values()]
    others = {kind for kinds in REQUESTS.values() for kind in kinds.values()} - set(on_unix)
    replies = {(v["answers"], v["name"]) for v in VECTORS if "answers" in v}
    codes = {v["message"]["error"]["code"] for v in VECTORS if "error" in v["message"]}

    assert {vector["name"] for vector in VECTORS} == set(KINDS)
    assert names([*on_unix, *(kind.reply for kind in on_unix)]) <= {
        vector["name"] for vector in of_kind("attach")
    }
    assert names(others) == {vector["name"] for vector in of_kind("request")}
    assert {(kind.__name__, kind.reply.__name__) for kind in others} == replies
    assert names(NOTICES.values()) == {vector["name"] for vector in of_kind("notice")}
    assert set(EVENTS) == {vector["message"]["op"] for vector in of_kind("event")}
    assert codes == {code.value for code in ErrorCode}


@pytest.mark.parametrize("vector", json.loads((FOLDER / "prompts.json").read_text()))
def test_the_digest_of_a_prompt_is_made_as_the_page_says(vector: dict[str, Any]) -> None:
    ids = b"".join(one.to_bytes(8, "little", signed=True) for one in vector["token_ids"])
    parts = [ids, *(text.encode() for text in vector["conditions"])]
    stream = b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    assert hashlib.blake2b(stream, digest_size=16).hexdigest() == vector["prompt_digest"]
