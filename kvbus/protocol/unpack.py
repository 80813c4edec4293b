"""Bytes of msgpack as a map with string keys, bounded before anything is built.

Refuses more than `MAX_ITEMS` items in a message, a key that is there twice, and all that is no
such map: `ProtocolError`.
"""

from collections import Counter
from contextlib import suppress
from typing import Any

import msgpack

from kvbus.errors import ErrorCode, ProtocolError

MAX_ITEMS = 2**18
"""Items inside of arrays and maps, keys included: some thirty ranks of 160 regions each."""
UNSCANNED_BYTES = 16 * 1024
"""A message of this size cannot hold the loop for more than milliseconds, whatever is in it."""


def unpack_map(frame: bytes) -> dict[str, Any]:
    """The map in ``frame``; raises `ProtocolError` and nothing else, whatever the bytes."""
    if len(frame) > UNSCANNED_BYTES and num_items(frame) > MAX_ITEMS:
        raise ProtocolError(
            f"message has more than {MAX_ITEMS} items", code=ErrorCode.TOO_LARGE, limit=MAX_ITEMS
        )
    try:
        fields = _unpack(frame, object_pairs_hook=_map_of)
    except _RepeatedKeyError as error:
        raise _repeated(frame, str(error)) from error
    except Exception as error:  # msgpack documents no closed set; every one means "not a message"
        raise ProtocolError(f"frame is not msgpack: {type(error).__name__}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("frame is not a map")
    return fields


def readable_id(fields: dict[str, Any]) -> int | None:
    """The request id among ``fields``, if it is one."""
    request_id = fields.get("id")
    return request_id if type(request_id) is int and request_id >= 0 else None


class _RepeatedKeyError(Exception):
    """Out of the hook of msgpack, with the key."""


def _unpack(frame: bytes, **options: Any) -> Any:
    return msgpack.unpackb(frame, raw=False, strict_map_key=True, max_ext_len=0, **options)


def _map_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _RepeatedKeyError(key)
    return fields


def _repeated(frame: bytes, key: str) -> ProtocolError:
    request_id = None
    with suppress(Exception):  # what follows the repeated key may be no msgpack
        fields = _unpack(frame)  # once more, without the hook: the answer has the request's id
        request_id = readable_id(fields) if isinstance(fields, dict) else None
    return ProtocolError(
        f"key '{key[:64]}' is there twice", code=ErrorCode.INVALID, request_id=request_id
    )


# The first byte of an item says how long it is, or how many bytes say so. Items follow each other
# without nesting in the bytes, so that counting needs no stack:
#
#     _SIZES      bytes of the whole item, for arrays and maps of their header
#     _CHILDREN   items that follow as its content
#     _LENGTHS    bytes of the length that follows, of a string or of binary
#     _COUNTS     bytes of the count that follows, of an array or of a map
_SIZES, _CHILDREN, _LENGTHS, _COUNTS = (bytearray(256) for _ in range(4))
_FIRST_MAP_HEADER = 0xDE
for _byte in range(256):
    if _byte < 0x80 or _byte >= 0xE0:  # a small integer
        _SIZES[_byte] = 1
    elif _byte < 0x90:  # a small map
        _SIZES[_byte], _CHILDREN[_byte] = 1, 2 * (_byte & 0x0F)
    elif _byte < 0xA0:  # a small array
        _SIZES[_byte], _CHILDREN[_byte] = 1, _byte & 0x0F
    elif _byte < 0xC0:  # a short string
        _SIZES[_byte] = 1 + (_byte & 0x1F)
for _byte, _size in zip(
    (0xC0, 0xC2, 0xC3, 0xCA, 0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3),
    (1, 1, 1, 5, 9, 2, 3, 5, 9, 2, 3, 5, 9),
    strict=True,
):  # nil, false, true, floats, integers
    _SIZES[_byte] = _size
for _byte, _size in zip((0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB), (1, 2, 4, 1, 2, 4), strict=True):
    _LENGTHS[_byte] = _size
for _byte, _size in zip((0xDC, 0xDD, 0xDE, 0xDF), (2, 4, 2, 4), strict=True):
    _COUNTS[_byte] = _size


def num_items(frame: bytes) -> int:
    """How many items arrays and maps say to hold; stops at more than `MAX_ITEMS`.

    Stops as well at the end of the bytes and at extension types, which are refused anyway. Some
    0.1 µs an item, so that the worst frame takes some 30 ms.
    """
    at, num_left, total = 0, 1, 0
    sizes, children = _SIZES, _CHILDREN
    while num_left and at < len(frame) and total <= MAX_ITEMS:
        kind = frame[at]
        if size := sizes[kind]:
            at, num_inside = at + size, children[kind]
        elif width := _LENGTHS[kind]:
            start = at + 1 + width
            at, num_inside = start + int.from_bytes(frame[at + 1 : start], "big"), 0
        elif width := _COUNTS[kind]:
            start = at + 1 + width
            count = int.from_bytes(frame[at + 1 : start], "big")
            at, num_inside = start, 2 * count if kind >= _FIRST_MAP_HEADER else count
        else:
            break
        num_left += num_inside - 1
        total += num_inside
    return total
