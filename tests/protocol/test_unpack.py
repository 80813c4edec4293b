"""A message is bounded before anything of it is built, and says each thing once."""

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.protocol import MAX_FRAME_BYTES, MAX_ITEMS, decode, num_items, unpack_map
from tests.examples import num_examples
from tests.protocol.strategies import TEXT

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary()
)
VALUES = st.recursive(
    SCALARS | st.integers(60_000, 70_000).map(bytes),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(TEXT, inner, max_size=20),
    max_leaves=60,
)
ARRAY_32 = b"\xdd"
EMPTY = {"maps": b"\x80", "arrays": b"\x90", "strings": b"\xa0", "numbers": b"\x01"}


def num_inside(value: Any) -> int:
    """The oracle: items in all arrays and maps, of what was built."""
    match value:
        case list():
            return len(value) + sum(map(num_inside, value))
        case dict():
            return 2 * len(value) + sum(map(num_inside, value.values()))
    return 0


def field_of(count: int, item: bytes) -> bytes:
    """A map whose one field is an array of so many times ``item``."""
    return b"\x81\xa1x" + ARRAY_32 + count.to_bytes(4, "big") + item * count


def refusal_of(frame: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as refused:
        decode(frame)
    return refused.value


@settings(max_examples=num_examples(300))
@given(VALUES)
def test_items_are_counted_without_building_them(value: Any) -> None:
    assert num_items(msgpack.packb(value)) == num_inside(value)


@given(st.binary(max_size=300))
def test_counting_ends_whatever_the_bytes(frame: bytes) -> None:
    assert num_items(frame) >= 0


@pytest.mark.parametrize("item", EMPTY.values(), ids=EMPTY)
def test_a_frame_full_of_small_items_is_refused_before_one_is_built(item: bytes) -> None:
    frame = field_of(MAX_FRAME_BYTES - 16, item)
    tracemalloc.start()

    try:
        refused = refusal_of(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert refused.code is ErrorCode.TOO_LARGE
    assert peak < 1 << 20


def test_items_that_lie_deep_count_as_well() -> None:
    row = b"\xdc\xff\xff" + b"\x01" * 65_535

    refused = refusal_of(field_of(16, row))

    assert refused.code is ErrorCode.TOO_LARGE


def test_as_many_items_as_the_bound_are_a_message() -> None:
    count = MAX_ITEMS - 2

    assert unpack_map(field_of(count, b"\x01")) == {"x": [1] * count}


def test_long_tables_of_blocks_are_few_items() -> None:
    frame = msgpack.packb({"tables": {"full": {"ids": bytes(4 << 20)}}})

    assert num_items(frame) == 6
    assert unpack_map(frame)["tables"]["full"]["ids"] == bytes(4 << 20)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x86\xa1v\x01\xa2op\xa4ping\xa2op\xa3ack\xa2id\x07\xa4boot\xa1b\xa4body\x80",
        b"\x85\xa1v\x01\xa2op\xa4ping\xa2id\x07\xa4boot\xa1b\xa4body\x82\xa2op\x01\xa2op\x01",
    ],
    ids=["in the envelope", "in the body"],
)
def test_a_key_that_is_there_twice_is_refused_with_the_id(frame: bytes) -> None:
    refused = refusal_of(frame)

    assert refused.code is ErrorCode.INVALID
    assert refused.request_id == 7
    assert refused.message == "key 'op' is there twice"


def test_a_map_of_nothing_but_one_key_is_refused_at_once() -> None:
    count = MAX_ITEMS // 2 - 1

    refused = refusal_of(b"\xdf" + count.to_bytes(4, "big") + b"\xa1k\x01" * count)

    assert refused.message == "key 'k' is there twice"
