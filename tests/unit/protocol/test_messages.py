"""A body becomes a typed message or a refusal that names the field, and nothing else."""

import re
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus import protocol as wire
from kvbus.errors import ErrorCode, GeometryError, KVBusError, ProtocolError, RequestRefused
from kvbus.geometry import BlockTable
from tests.support.examples import num_examples
from tests.unit.protocol.strategies import MESSAGES, PLAIN, messages, value_or_refusal
from tests.unit.vectors.golden import example

JARGON = re.compile(r"`|Expected |Object |Invalid ")  # msgspec says where as `$.name`
"""What only messages of msgspec have."""
RIGHTS = {"secret", "token", "rank_secret", "grant", "ticket", "transfer_id"}
RIGHT = "b1946ac92492d2347c6235b4d2611184"
TABLES = {"full": {"ids": b"\x01\0\0\0"}}
OFFER: dict[str, Any] = {"request_id": "r", "num_tokens": 3, "tables": TABLES}
ACQUIRE = {"agent_boot": "b", "offer_id": "o", "reader_id": "r", "lease_s": 5, "secret": RIGHT}


def packed(body: object) -> Any:
    """``body`` as it arrives: through msgpack."""
    return msgpack.unpackb(msgpack.packb(body))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=num_examples(60, 5), suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_message_round_trips_or_names_field(kind: type[wire.Message], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    body = wire.to_body(message)
    name = data.draw(st.sampled_from([*kind.__struct_fields__, "x"]))
    altered = body | {name: data.draw(PLAIN)}

    arrived = wire.from_body(kind, packed(body | {"a later field": data.draw(PLAIN)}))
    other = value_or_refusal(lambda: wire.from_body(kind, packed(altered)))

    assert wire.from_body(kind, packed(body)) == arrived == message
    if isinstance(other, ProtocolError):
        assert other.code is ErrorCode.INVALID
        assert other.detail["op"] == (kind.op or kind.__name__)
        assert name in other.message
        assert not JARGON.search(other.message) or JARGON.search(repr(altered))
    else:
        assert wire.from_body(kind, packed(wire.to_body(other))) == other


WRONG: dict[str, tuple[type[wire.Message], dict[Any, Any], str]] = {
    "missing": (wire.MakeOffer, {"request_id": "r", "tables": {}}, "num_tokens"),
    "bool_is_no_int": (wire.MakeOffer, OFFER | {"num_tokens": True}, "num_tokens"),
    "int_is_no_bool": (wire.MakeOffer, OFFER | {"sealed": 1}, "sealed"),
    "too_many": (wire.MakeOffer, OFFER | {"num_tokens": 2**31}, "num_tokens"),
    "beyond_64_bits": (wire.MakeOffer, OFFER | {"num_tokens": 2**64 - 1}, "num_tokens"),
    "long_id": (wire.MakeOffer, OFFER | {"request_id": 257 * "x"}, "request_id"),
    "text_is_no_bytes": (wire.MakeOffer, OFFER | {"tables": {"full": {"ids": "AAAA"}}}, "ids"),
    "zero_seconds": (wire.MakeOffer, OFFER | {"ttl_s": 0}, "ttl_s"),
    "more_than_a_day": (wire.MakeOffer, OFFER | {"ttl_s": 86_401}, "ttl_s"),
    "not_a_number": (wire.MakeOffer, OFFER | {"ttl_s": float("nan")}, "ttl_s"),
    "endless": (wire.MakeOffer, OFFER | {"ttl_s": float("inf")}, "ttl_s"),
    "too_many_groups": (
        wire.MakeOffer,
        OFFER | {"tables": {str(n): {} for n in range(65)}},
        "tables",
    ),
    "detail_of_lists": (
        wire.ErrorBody,
        {"code": "busy", "message": "", "detail": {"x": []}},
        "detail",
    ),
    "epoch_zero": (wire.Renew, {"agent_boot": "b", "offer_id": "o", "epoch": 0}, "epoch"),
    "address_out_of_signed_arithmetic": (
        wire.HandshakeDone,
        wire.to_body(example(wire.HandshakeDone)) | {"memory": {"addresses": [{"kv": 2**62}]}},
        "addresses",
    ),
    "key_of_bytes": (wire.Status, {b"x": 1}, "key"),
}


@pytest.mark.parametrize(("kind", "body", "field"), WRONG.values(), ids=WRONG)
def test_a_value_just_out_of_its_bounds_is_refused_by_name(
    kind: type[wire.Message], body: dict[Any, Any], field: str
) -> None:
    with pytest.raises(ProtocolError) as refused:
        wire.from_body(kind, body)
    assert refused.value.code is ErrorCode.INVALID
    assert field in refused.value.message


def test_a_body_nested_deeper_than_the_stack_is_refused_or_taken() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"ticket": deep}
    body = {"fetch_id": "f", "num_tokens": 1, "tables": {}, "ticket": deep}
    assert wire.from_body(wire.StartFetch, body).ticket is not None
    with pytest.raises(ProtocolError):
        wire.from_body(wire.Register, {"engine": deep})


def test_whole_second_may_be_integer_and_absent_fields_default() -> None:
    offer = wire.from_body(wire.MakeOffer, packed(OFFER))
    assert wire.from_body(wire.Acquire, packed(ACQUIRE)).lease_s == 5.0
    assert (offer.sealed, offer.ttl_s) == (True, None)
    assert offer.tables["full"] == BlockTable.of([1])


def test_error_travels_with_detail_and_busy_has_retry_time() -> None:
    differ = GeometryError("differ", code=ErrorCode.INCOMPATIBLE, field="dtype", prefill="a")
    known = KVBusError("full", code=ErrorCode.BUSY, retry_after_s=3.0, max_offers=1)
    full = wire.refusal(packed(wire.error_body(KVBusError("full", code=ErrorCode.BUSY))))
    for one in (differ, known, KVBusError("over", code=ErrorCode.CLOSED)):
        arrived = wire.refusal(packed(wire.error_body(one)))
        assert (arrived.code, arrived.message, arrived.detail) == (
            one.code,
            one.message,
            one.detail,
        )
    assert float(full.detail["retry_after_s"]) > 0


@given(st.dictionaries(st.sampled_from(["code", "message", "detail"]), PLAIN))
def test_whatever_an_error_map_holds_it_reads_as_a_refusal(body: dict[str, Any]) -> None:
    assert isinstance(wire.refusal(body), RequestRefused)


@pytest.mark.parametrize("detail", [{"code": "x"}, {"message": "x"}, {"self": "x"}])
def test_detail_named_like_argument_and_newer_code_are_kept(detail: dict[str, str]) -> None:
    known = wire.refusal({"code": "busy", "message": "m", "detail": detail})
    newer = wire.refusal({"code": "newer", "message": "m", "detail": {}})
    assert (known.code, known.detail) == (ErrorCode.BUSY, detail)
    assert (newer.code, newer.detail) == (ErrorCode.INTERNAL, {"remote_code": "newer"})


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if RIGHTS & {*kind.__struct_fields__}])
def test_repr_of_message_or_frame_hides_rights(kind: type[wire.Message]) -> None:
    rights = dict.fromkeys(RIGHTS & {*kind.__struct_fields__}, RIGHT)
    others = dict.fromkeys({*kind.__struct_fields__} - rights.keys(), "shown")
    message = kind(**others, **rights)
    text = repr(message)
    frames = wire.encode_request("op", 1, "boot", message), wire.encode_reply(1, "boot", message)
    assert RIGHT not in f"{text} {[wire.decode(frame) for frame in frames]!r}"
    assert text.count("shown") == len(others)
