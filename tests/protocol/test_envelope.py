"""Any bytes at all become an envelope or a `ProtocolError` that says what is wrong with them."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.protocol import (
    MAX_FRAME_BYTES,
    MAX_ID,
    PROTOCOL_VERSION,
    Envelope,
    Notice,
    Reply,
    RequestFrame,
    decode,
    encode_notice,
    encode_refusal,
    encode_reply,
    encode_request,
)
from tests.examples import num_examples
from tests.protocol.strategies import PLAIN, TEXT, value_or_refusal

BODIES = st.dictionaries(TEXT, PLAIN, max_size=4)
IDS = st.integers(0, MAX_ID)
NAMES = TEXT.filter(bool)
REQUESTS = st.builds(RequestFrame, NAMES, IDS, NAMES, BODIES)
REPLIES = st.builds(Reply, IDS, NAMES, ok=BODIES) | st.builds(Reply, IDS, NAMES, error=BODIES)
NOTICES = st.builds(Notice, NAMES, IDS, NAMES, BODIES)
REQUEST = {"v": PROTOCOL_VERSION, "op": "ping", "id": 7, "boot": "b", "body": {}}
REPLY = {"v": PROTOCOL_VERSION, "re": 7, "boot": "b", "ok": {}}


def encoded(envelope: Envelope) -> bytes:
    match envelope:
        case RequestFrame(op, request_id, boot, body):
            return encode_request(op, request_id, boot, body)
        case Reply(request_id, boot, None, error):
            return encode_refusal(request_id, boot, error or {})
        case Reply(request_id, boot, ok):
            return encode_reply(request_id, boot, ok or {})
        case Notice(op, seq, boot, body):
            return encode_notice(op, seq, boot, body)


def decodes_or_refuses(frame: bytes) -> None:
    """Any other exception fails the test."""
    result = value_or_refusal(lambda: decode(frame))

    assert isinstance(result, RequestFrame | Reply | Notice | ProtocolError)


def refusal_of(fields: object) -> ProtocolError:
    with pytest.raises(ProtocolError) as refused:
        decode(msgpack.packb(fields))
    return refused.value


@settings(max_examples=num_examples(300))
@given(REQUESTS | REPLIES | NOTICES)
def test_every_envelope_arrives_as_it_was_sent(envelope: Envelope) -> None:
    assert decode(encoded(envelope)) == envelope


@settings(max_examples=num_examples(500))
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_a_protocol_error(frame: bytes) -> None:
    decodes_or_refuses(frame)


@given(REQUESTS | REPLIES | NOTICES, st.data())
def test_a_truncated_frame_is_refused(envelope: Envelope, data: st.DataObject) -> None:
    frame = encoded(envelope)
    cut = data.draw(st.integers(0, len(frame) - 1))

    with pytest.raises(ProtocolError):
        decode(frame[:cut])


@settings(max_examples=num_examples(500))
@given(REQUESTS | REPLIES | NOTICES, st.data())
def test_a_mutated_frame_raises_nothing_but_a_protocol_error(
    envelope: Envelope, data: st.DataObject
) -> None:
    frame = bytearray(encoded(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    decodes_or_refuses(bytes(frame))


@given(st.binary(min_size=1, max_size=20))
def test_bytes_after_the_map_are_refused(more: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode_request("ping", 1, "b", {}) + more)


@pytest.mark.parametrize("more", [b"\x00", b"\xc1"])
def test_a_key_that_is_there_twice_is_refused_whatever_follows(more: bytes) -> None:
    twice = msgpack.packb("key") + msgpack.packb(1)

    with pytest.raises(ProtocolError):
        decode(b"\x82" + twice + twice + more)


WRONG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "version_is_text": (REQUEST | {"v": "1"}, "v"),
    "version_is_a_bool": (REQUEST | {"v": True}, "v"),
    "version_is_missing": ({k: v for k, v in REQUEST.items() if k != "v"}, "v"),
    "op_is_empty": (REQUEST | {"op": ""}, "op"),
    "op_is_bytes": (REQUEST | {"op": b"ping"}, "op"),
    "op_is_long": (REQUEST | {"op": 65 * "x"}, "op"),
    "boot_is_empty": (REQUEST | {"boot": ""}, "boot"),
    "boot_is_long": (REQUEST | {"boot": 65 * "x"}, "boot"),
    "boot_is_missing": ({k: v for k, v in REPLY.items() if k != "boot"}, "boot"),
    "id_is_a_bool": (REQUEST | {"id": True}, "id"),
    "id_is_a_float": (REQUEST | {"id": 7.0}, "id"),
    "id_is_negative": (REQUEST | {"id": -1}, "id"),
    "body_is_a_list": (REQUEST | {"body": []}, "body"),
    "body_is_missing": ({k: v for k, v in REQUEST.items() if k != "body"}, "body"),
    "seq_is_missing": ({k: v for k, v in REQUEST.items() if k != "id"}, "seq"),
    "re_is_nothing": (REPLY | {"re": None}, "re"),
    "ok_is_nothing": (REPLY | {"ok": None}, "ok"),
    "error_is_text": ({"v": 1, "re": 7, "boot": "b", "error": "no"}, "error"),
}


@pytest.mark.parametrize("case", WRONG_FIELDS)
def test_a_wrong_field_is_refused_by_name(case: str) -> None:
    fields, name = WRONG_FIELDS[case]

    refused = refusal_of(fields)

    assert refused.code is ErrorCode.MALFORMED
    assert refused.detail["field"] == name


@pytest.mark.parametrize("fields", [REPLY | {"error": {}}, {"v": 1, "re": 7, "boot": "b"}])
def test_a_reply_with_both_outcomes_or_none_is_refused(fields: dict[str, Any]) -> None:
    assert refusal_of(fields).code is ErrorCode.MALFORMED


@pytest.mark.parametrize("frame", [[], 1, None, "x", {1: 2}, {b"v": 1}, {"v": 1, b"op": "x"}])
def test_what_is_not_a_map_with_string_keys_is_refused(frame: object) -> None:
    assert refusal_of(frame).code is ErrorCode.MALFORMED


@given(st.integers(0, MAX_ID).filter(lambda version: version != PROTOCOL_VERSION))
def test_another_version_is_refused_with_both_versions(version: int) -> None:
    refused = refusal_of(REQUEST | {"v": version})

    assert refused.code is ErrorCode.UNSUPPORTED_VERSION
    assert refused.detail == {"theirs": version, "ours": PROTOCOL_VERSION}
    assert refused.request_id == 7


@given(IDS, st.sampled_from(["v", "op", "boot", "body"]))
def test_the_id_of_a_refused_request_is_kept_when_it_can_be_read(number: int, field: str) -> None:
    assert refusal_of(REQUEST | {"id": number, field: None}).request_id == number


@pytest.mark.parametrize("wrong", [None, "7", -1, True, 7.0, [7], {}])
def test_an_id_that_cannot_be_read_is_not_kept(wrong: object) -> None:
    assert refusal_of(REQUEST | {"id": wrong}).request_id is None


def test_fields_that_are_not_known_are_ignored() -> None:
    later = {"later": [1, {"a": None}]}

    assert decode(msgpack.packb(REQUEST | later)) == RequestFrame("ping", 7, "b", {})
    assert decode(msgpack.packb(REPLY | later)) == Reply(7, "b", ok={})


def test_a_frame_of_the_limit_is_read_and_one_byte_more_is_refused_both_ways() -> None:
    room = MAX_FRAME_BYTES - len(encode_request("x", 1, "b", {"fill": bytes(2**16)}))
    fill = bytes(2**16 + room)

    frame = encode_request("x", 1, "b", {"fill": fill})

    assert len(frame) == MAX_FRAME_BYTES
    assert decode(frame).boot == "b"
    with pytest.raises(ProtocolError) as refused:
        decode(frame + b"\0")
    assert refused.value.code is ErrorCode.TOO_LARGE
    with pytest.raises(ProtocolError) as unsent:
        encode_request("x", 1, "b", {"fill": fill + b"\0"})
    assert unsent.value.code is ErrorCode.TOO_LARGE
    assert unsent.value.detail["limit_bytes"] == MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ],
    ids=["array", "map", "bin", "str"],
)
def test_a_declared_length_of_four_billion_is_refused_without_making_room(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(header)
    with pytest.raises(ProtocolError):
        decode(b"\x81\xa1v" + header)


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_deep_nesting_raises_nothing_but_a_protocol_error(nested: bytes, depth: int) -> None:
    decodes_or_refuses(nested * depth + b"\xc0")
    decodes_or_refuses(
        b"\x85\xa1v\x01\xa2op\xa1x\xa2id\x01\xa4boot\xa1b\xa4body\x81\xa1a"
        + nested * depth
        + b"\xc0"
    )


@pytest.mark.parametrize("value", [msgpack.ExtType(5, b"xy"), msgpack.Timestamp(1)])
def test_extension_types_are_refused(value: object) -> None:
    assert refusal_of(REQUEST | {"body": {"x": value}}).code is ErrorCode.MALFORMED


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x81\xa1v\xa1\xff")
