"""A body becomes a typed message or a refusal that names the field, and nothing else."""

from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, GeometryError, KVBusError, ProtocolError, RequestRefused
from kvbus.geometry import BlockTable
from kvbus.protocol import (
    AgentRole,
    Claim,
    EngineMemory,
    ErrorBody,
    Fetched,
    MakeOffer,
    Message,
    Outcome,
    Register,
    Renew,
    StartFetch,
    Status,
    decode,
    encode_reply,
    encode_request,
    error_body,
    from_body,
    refusal,
    to_body,
)
from tests.examples import num_examples
from tests.protocol.strategies import MESSAGES, PLAIN, messages, value_or_refusal

RIGHTS = {"secret", "token", "access", "ticket"}
RIGHT = "b1946ac92492d2347c6235b4d2611184"
SLOW = settings(
    max_examples=num_examples(60, 5), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
OFFER: dict[str, Any] = {
    "request_id": "r",
    "num_tokens": 3,
    "tables": {"full": {"ids": b"\x01\0\0\0"}},
}


def packed(body: object) -> Any:
    """``body`` as it arrives: through msgpack."""
    return msgpack.unpackb(msgpack.packb(body))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@SLOW
@given(st.data())
def test_a_message_arrives_as_it_was_sent_and_any_other_value_is_taken_or_refused(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages(kind))
    body = to_body(message)
    names = st.sampled_from(kind.__struct_fields__) if kind.__struct_fields__ else st.just("x")
    altered = body | {data.draw(names): data.draw(PLAIN)}

    arrived = from_body(kind, packed(body | {"a later field": data.draw(PLAIN)}))
    other = value_or_refusal(lambda: from_body(kind, packed(altered)))

    assert from_body(kind, packed(body)) == arrived == message
    if isinstance(other, ProtocolError):
        assert other.code is ErrorCode.INVALID
    else:
        assert from_body(kind, packed(to_body(other))) == other


WRONG: dict[str, tuple[type[Message], dict[Any, Any], str]] = {
    "missing": (MakeOffer, {"request_id": "r", "tables": {}}, "num_tokens"),
    "bool_is_no_int": (MakeOffer, OFFER | {"num_tokens": True}, "num_tokens"),
    "float_is_no_int": (MakeOffer, OFFER | {"num_tokens": 3.5}, "num_tokens"),
    "int_is_no_bool": (MakeOffer, OFFER | {"sealed": 1}, "sealed"),
    "text_is_no_int": (MakeOffer, OFFER | {"num_tokens": "3"}, "num_tokens"),
    "negative": (MakeOffer, OFFER | {"num_tokens": -1}, "num_tokens"),
    "too_many": (MakeOffer, OFFER | {"num_tokens": 2**31}, "num_tokens"),
    "beyond_64_bits": (MakeOffer, OFFER | {"num_tokens": 2**64 - 1}, "num_tokens"),
    "empty_id": (MakeOffer, OFFER | {"request_id": ""}, "request_id"),
    "long_id": (MakeOffer, OFFER | {"request_id": 257 * "x"}, "request_id"),
    "bytes_are_no_text": (MakeOffer, OFFER | {"request_id": b"r"}, "request_id"),
    "text_is_no_bytes": (MakeOffer, OFFER | {"tables": {"full": {"ids": "AAAA"}}}, "ids"),
    "list_is_no_map": (MakeOffer, OFFER | {"tables": []}, "tables"),
    "list_is_no_ticket": (StartFetch, {"fetch_id": "f", "ticket": [], "num_tokens": 1}, "ticket"),
    "zero_seconds": (MakeOffer, OFFER | {"ttl_s": 0}, "ttl_s"),
    "more_than_a_day": (MakeOffer, OFFER | {"ttl_s": 86_401}, "ttl_s"),
    "not_a_number": (MakeOffer, OFFER | {"ttl_s": float("nan")}, "ttl_s"),
    "endless": (MakeOffer, OFFER | {"ttl_s": float("inf")}, "ttl_s"),
    "too_many_groups": (MakeOffer, OFFER | {"tables": {str(n): {} for n in range(65)}}, "tables"),
    "unknown_enum": (ErrorBody, {"code": "no_such", "message": ""}, "code"),
    "detail_of_lists": (ErrorBody, {"code": "busy", "message": "", "detail": {"x": []}}, "detail"),
    "epoch_zero": (Renew, {"agent_boot": "b", "offer_id": "o", "epoch": 0}, "epoch"),
    "key_of_bytes": (Status, {b"x": 1}, "key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_refused_by_name(case: str) -> None:
    kind, body, field = WRONG[case]

    with pytest.raises(ProtocolError) as refused:
        from_body(kind, body)

    assert refused.value.code is ErrorCode.INVALID
    assert field in refused.value.message
    assert refused.value.detail["op"] == (kind.op or kind.__name__)


def test_a_body_nested_deeper_than_the_stack_is_refused_or_taken() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"ticket": deep}
    body = {"fetch_id": "f", "num_tokens": 1, "tables": {}, "ticket": deep}

    fetch = from_body(StartFetch, body)

    assert fetch.ticket is not None
    with pytest.raises(ProtocolError):
        from_body(Register, {"engine": deep})


def test_a_whole_second_may_travel_as_an_integer() -> None:
    claim = {"agent_boot": "b", "offer_id": "o", "reader_id": "r", "lease_s": 5, "secret": RIGHT}

    assert from_body(Claim, packed(claim)).lease_s == 5.0


def test_absent_fields_have_their_defaults() -> None:
    offer = from_body(MakeOffer, packed(OFFER))

    assert offer.sealed
    assert offer.ttl_s is None
    assert offer.tables["full"] == BlockTable.of([1])


def test_an_error_travels_with_code_message_and_detail() -> None:
    error = GeometryError("differ", code=ErrorCode.INCOMPATIBLE, field="dtype", prefill="a")

    arrived = refusal(packed(error_body(error)))

    assert isinstance(arrived, RequestRefused)
    assert (arrived.code, arrived.message, arrived.detail) == (
        error.code,
        error.message,
        error.detail,
    )


def test_a_busy_refusal_always_says_when_to_ask_again() -> None:
    known = KVBusError("full", code=ErrorCode.BUSY, retry_after_s=3.0, max_offers=1)

    assert error_body(KVBusError("full", code=ErrorCode.BUSY))["detail"]["retry_after_s"] > 0
    assert error_body(known)["detail"] == {"retry_after_s": 3.0, "max_offers": 1}
    assert error_body(KVBusError("over", code=ErrorCode.CLOSED))["detail"] == {}


@given(st.dictionaries(st.sampled_from(["code", "message", "detail"]), PLAIN))
def test_whatever_an_error_map_holds_it_reads_as_a_refusal(body: dict[str, Any]) -> None:
    assert isinstance(refusal(body), RequestRefused)


@pytest.mark.parametrize("name", ["code", "message", "self"])
def test_a_detail_named_like_an_argument_still_reads_as_a_refusal(name: str) -> None:
    body = {"code": "busy", "message": "later", "detail": {name: "x"}}

    arrived = refusal(body)

    assert arrived.code is ErrorCode.BUSY
    assert arrived.detail == {name: "x"}


def test_an_error_code_of_a_newer_agent_reads_as_internal_and_keeps_its_text() -> None:
    arrived = refusal({"code": "newer", "message": "m", "detail": {}})

    assert arrived.code is ErrorCode.INTERNAL
    assert arrived.detail == {"remote_code": "newer"}


def test_an_address_that_would_not_fit_into_signed_arithmetic_is_refused() -> None:
    fits = from_body(_Holder, {"memory": _memory(2**62 - 1)})

    assert fits.memory.addresses == ({"kv": 2**62 - 1},)
    with pytest.raises(ProtocolError):
        from_body(_Holder, {"memory": _memory(2**62)})


class _Holder(Message, frozen=True):
    memory: EngineMemory


def _memory(address: int) -> dict[str, Any]:
    axis = {"name": "dim", "size": 1, "stride_bytes": 1}
    group = {"name": "g", "layers": [0], "block_size": 1, "num_kv_heads": 1, "head_dim": 1}
    region = {"segment_id": "kv", "offset_bytes": 0, "group": "g", "layers": [0], "parts": ["k"]}
    rank = {
        "rank": 0,
        "segments": [{"segment_id": "kv", "size_bytes": 1}],
        "regions": [region | {"first_head": 0, "num_heads": 1, "axes": [axis]}],
    }
    engine = {"engine_id": "e", "model": "m", "tp_size": 1, "groups": [group | {"dtype": "int8"}]}
    return {"engine": engine, "ranks": [rank], "addresses": [{"kv": address}]}


def test_outcomes_and_roles_travel_as_their_words() -> None:
    fetched = Fetched(
        fetch_id="f", request_id="r", outcome=Outcome.FAILED, stage="reading", blocks_free=False
    )

    assert to_body(fetched)["outcome"] == "failed"
    assert [role.value for role in AgentRole] == ["prefill", "decode"]


@pytest.mark.parametrize("kind", [kind for kind in MESSAGES if RIGHTS & {*kind.__struct_fields__}])
def test_the_repr_of_a_message_has_no_right_to_anything(kind: type[Message]) -> None:
    rights = dict.fromkeys(RIGHTS & {*kind.__struct_fields__}, RIGHT)
    others = dict.fromkeys({*kind.__struct_fields__} - rights.keys(), "shown")

    text = repr(kind(**others, **rights))

    assert RIGHT not in text
    assert text.count("shown") == len(others)


def test_the_repr_of_a_frame_has_no_body() -> None:
    claim = Claim(agent_boot="b", offer_id="o", reader_id="r", lease_s=5.0, secret=RIGHT)

    request = decode(encode_request("claim", 1, "boot", claim))
    reply = decode(encode_reply(1, "boot", claim))

    assert RIGHT not in f"{request!r} {reply!r} {claim!r}"
