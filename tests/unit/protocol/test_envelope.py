"""Any bytes at all become an envelope or a `ProtocolError`, before much of them is built.

What a request of each wrong form is refused with, `tests/unit/vectors/refused.json` says.
"""

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus import protocol as wire
from kvbus.errors import ErrorCode, ProtocolError
from tests.support.examples import num_examples
from tests.unit.protocol.strategies import PLAIN, TEXT, value_or_refusal

BODIES = st.dictionaries(TEXT, PLAIN, max_size=4)
IDS = st.integers(0, wire.MAX_ID)
NAMES = TEXT.filter(bool)
ENVELOPES = (
    st.builds(wire.RequestFrame, NAMES, IDS, NAMES, BODIES)
    | st.builds(wire.Reply, IDS, NAMES, ok=BODIES)
    | st.builds(wire.Reply, IDS, NAMES, error=BODIES)
    | st.builds(wire.Notice, NAMES, IDS, NAMES, BODIES)
)
VALUES = st.recursive(
    PLAIN | st.floats() | st.integers(60_000, 70_000).map(bytes),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(TEXT, inner, max_size=20),
    max_leaves=60,
)
REQUEST = {"v": wire.PROTOCOL_VERSION, "op": "ping", "id": 7, "boot": "b", "body": {}}
REPLY = {"v": wire.PROTOCOL_VERSION, "re": 7, "boot": "b", "ok": {}}
REFUSAL = {"v": wire.PROTOCOL_VERSION, "re": 7, "boot": "b", "error": {}}
NOTICE = {"v": wire.PROTOCOL_VERSION, "op": "n", "seq": 7, "boot": "b", "body": {}}
NOTHING = {"v": wire.PROTOCOL_VERSION, "re": 7, "boot": "b"}
ABSENT = object()


def packed(fields: object) -> bytes:
    frame: bytes = msgpack.packb(fields)
    return frame


def field_of(count: int, item: bytes) -> bytes:
    """A map with one field, an array of ``count`` times ``item``."""
    return b"\x81\xa1x\xdd" + count.to_bytes(4, "big") + item * count


def encoded(envelope: wire.Envelope) -> bytes:
    match envelope:
        case wire.RequestFrame(op, request_id, boot, body):
            return wire.encode_request(op, request_id, boot, body)
        case wire.Reply(request_id, boot, None, error):
            return wire.encode_refusal(request_id, boot, error or {})
        case wire.Reply(request_id, boot, ok):
            return wire.encode_reply(request_id, boot, ok or {})
        case wire.Notice(op, seq, boot, body):
            return wire.encode_notice(op, seq, boot, body)


def is_read_or_refused(frame: bytes) -> bool:
    return isinstance(value_or_refusal(lambda: wire.decode(frame)), wire.Envelope | ProtocolError)


def refusal_of(frame: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as refused:
        wire.decode(frame)
    return refused.value


@settings(max_examples=num_examples(300))
@given(ENVELOPES, st.binary(min_size=1, max_size=20), st.data())
def test_envelope_round_trips(envelope: wire.Envelope, more: bytes, data: st.DataObject) -> None:
    frame = encoded(envelope)
    cut = data.draw(st.integers(0, len(frame) - 1))
    assert wire.decode(frame) == envelope
    assert refusal_of(frame[:cut])
    assert refusal_of(frame + more)


@settings(max_examples=num_examples(500))
@given(st.binary(max_size=300), ENVELOPES, st.data())
def test_any_bytes_are_read_or_refused(
    arbitrary: bytes, envelope: wire.Envelope, data: st.DataObject
) -> None:
    altered = bytearray(encoded(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
    for frame in (arbitrary, bytes(altered)):
        assert is_read_or_refused(frame)
        assert wire.num_items(frame) >= 0


@settings(max_examples=num_examples(500))
@given(
    st.sampled_from([REQUEST, REPLY, REFUSAL, NOTICE]),
    st.just(ABSENT) | st.text("x", min_size=64, max_size=65) | st.integers(-2, 2) | PLAIN,
    st.data(),
)
def test_field_is_kept_or_named(fields: dict[str, Any], value: object, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    changed = {**fields, name: value}
    if value is ABSENT:
        del changed[name]

    envelope = value_or_refusal(lambda: wire.decode(packed(changed)))

    if not isinstance(envelope, ProtocolError):
        taken = getattr(envelope, {"id": "request_id", "re": "request_id"}.get(name, name), 1)
        assert (type(taken), taken) == (type(value), value)
        return
    assert envelope.request_id == (None if name == "id" else fields.get("id"))
    if envelope.code is ErrorCode.UNSUPPORTED_VERSION:
        assert envelope.detail == {"theirs": value, "ours": wire.PROTOCOL_VERSION}
    else:
        assert envelope.code is ErrorCode.MALFORMED
        assert envelope.detail["field"] == name or value is ABSENT


TWICE, PAIRS = packed("key") + packed(1), wire.MAX_ITEMS // 2 - 1
BILLIONS = 4 * b"\xff"
REFUSED: dict[str, tuple[bytes, str]] = {
    "a reply with both outcomes": (packed(REPLY | REFUSAL), "malformed"),
    "a reply without an outcome": (packed(NOTHING), "malformed"),
    "a reply whose answer is nil": (packed(NOTHING | {"ok": None}), "malformed"),
    "a reply whose error is nil": (packed(NOTHING | {"error": None}), "malformed"),
    "a key that is there twice": (b"\x82" + TWICE + TWICE, "invalid"),
    "a key twice, and no more msgpack": (b"\x82" + TWICE + TWICE + b"\xc1", "invalid"),
    "a map of one key": (b"\xdf" + PAIRS.to_bytes(4, "big") + TWICE * PAIRS, "invalid"),
    "one item too many": (field_of(wire.MAX_ITEMS - 1, b"\x01"), "too_large"),
    "too many items, deep": (field_of(16, b"\xdc\xff\xff" + b"\x01" * 65_535), "too_large"),
    **{
        f"a length of four billion, {kind.hex()}": (b"\x81\xa1v" + kind + BILLIONS, "malformed")
        for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")
    },
}


@pytest.mark.parametrize(("frame", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_message_is_refused_by_its_code(frame: bytes, code: str) -> None:
    assert refusal_of(frame).code == code


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_deep_nesting_raises_nothing_but_a_protocol_error(nested: bytes) -> None:
    for depth in (1_000, 100_000):
        assert is_read_or_refused(packed(REQUEST | {"body": 0})[:-1] + nested * depth + b"\xc0")


def test_a_key_that_is_there_twice_is_refused_with_the_id() -> None:
    op, frame = packed("op") + packed("ping"), packed(REQUEST)
    for twice in (b"\x86" + frame[1:] + op, frame[:-1] + b"\x82" + op + op):
        refused = refusal_of(twice)
        assert (refused.code, refused.request_id) == (ErrorCode.INVALID, 7)
        assert refused.message == "key 'op' is there twice"


def test_fields_that_are_not_known_are_ignored() -> None:
    later = {"later": [1, {"a": None}]}
    assert wire.decode(packed(REQUEST | later)) == wire.RequestFrame("ping", 7, "b", {})
    assert wire.decode(packed(REPLY | later)) == wire.Reply(7, "b", ok={})


def test_limit_frame_is_read_and_one_byte_more_refused_both_ways() -> None:
    room = wire.MAX_FRAME_BYTES - len(wire.encode_request("x", 1, "b", {"fill": bytes(2**16)}))
    fill = bytes(2**16 + room)
    frame = wire.encode_request("x", 1, "b", {"fill": fill})
    assert len(frame) == wire.MAX_FRAME_BYTES
    assert wire.decode(frame).boot == "b"
    assert refusal_of(frame + b"\0").code is ErrorCode.TOO_LARGE
    with pytest.raises(ProtocolError) as unsent:
        wire.encode_request("x", 1, "b", {"fill": fill + b"\0"})
    assert unsent.value.code is ErrorCode.TOO_LARGE
    assert unsent.value.detail["limit_bytes"] == wire.MAX_FRAME_BYTES


def num_inside(value: Any) -> int:
    """The oracle: items in all arrays and maps, of what was built."""
    match value:
        case list():
            return len(value) + sum(map(num_inside, value))
        case dict():
            return 2 * len(value) + sum(map(num_inside, value.values()))
    return 0


@settings(max_examples=num_examples(300))
@given(VALUES)
def test_items_are_counted_without_building_them(value: Any) -> None:
    assert wire.num_items(packed(value)) == num_inside(value)


def test_max_items_are_unpacked_and_long_block_tables_count_few() -> None:
    count, table = wire.MAX_ITEMS - 2, {"full": {"ids": bytes(4 << 20)}}
    assert wire.unpack_map(field_of(count, b"\x01")) == {"x": [1] * count}
    assert wire.unpack_map(packed(table)) == table


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\xa0", b"\x01"])
def test_frame_full_of_small_items_is_refused_before_building(item: bytes) -> None:
    frame = field_of(wire.MAX_FRAME_BYTES - 16, item)
    tracemalloc.start()
    try:
        assert refusal_of(frame).code is ErrorCode.TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
