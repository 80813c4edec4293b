"""The envelope of a frame: a msgpack map, and its validation before anything is built.

One frame is one message. Its keys determine its kind:

    request   v, op, id, boot, secret, body  gets exactly one reply
    reply     v, re, boot, ok | error        for the request with that id
    notice    v, op, seq, boot, body         agent to engine, unsolicited
    event     v, op, seq, boot, body         on PUB, after a topic frame
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, NoReturn

import msgpack
import msgspec

from kvbus.errors import ErrorCode, ProtocolError, field_and_reason
from kvbus.protocol.message import Message, Redacted

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_PEER_REQUEST_BYTES = 4 * 1024 * 1024
"""On the peer socket, which strangers can reach."""
MAX_ITEMS = 2**18
"""Items inside arrays and maps, keys included: about 30 ranks of 160 regions each."""
MAX_PEER_ITEMS = 2**13
"""Decoding them takes about 2 ms. The largest `pack` has 5,300."""
MAX_ID = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode

Body = Mapping[str, Any]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
SenderSecret = Annotated[str, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0)]
"""At most `MAX_ID`, the largest integer of msgpack."""


class RequestFrame(Redacted, frozen=True, rename={"request_id": "id"}):
    """A request; ``request_id`` is unique within the sender's ``boot``.

    ``secret`` distinguishes the sender from others that know its boot id. If it is empty, the
    connection identifies the sender.
    """

    op: Name
    request_id: Number
    boot: Name
    body: Body
    secret: SenderSecret = ""


class Reply(Redacted, frozen=True, rename={"request_id": "re"}):
    """The one reply to ``request_id``: ``ok``, or ``error`` with code, message and detail."""

    request_id: Number
    boot: Name
    ok: Body | None = None
    error: Body | None = None


class Notice(Redacted, frozen=True):
    """An unsolicited message to an engine or to subscribers; ``seq`` counts in its session or
    topic.
    """

    op: Name
    seq: Number
    boot: Name
    body: Body


Envelope = RequestFrame | Reply | Notice


def encode_request(
    op: str, request_id: int, boot: str, body: Message | Body, *, secret: str = ""
) -> bytes:
    """Raise `ProtocolError` if it exceeds `MAX_FRAME_BYTES`."""
    fields = {"v": PROTOCOL_VERSION, "op": op, "id": request_id, "boot": boot, "body": body}
    return _pack(fields | {"secret": secret} if secret else fields)


def encode_reply(request_id: int, boot: str, ok: Message | Body) -> bytes:
    return _pack({"v": PROTOCOL_VERSION, "re": request_id, "boot": boot, "ok": ok})


def encode_refusal(request_id: int, boot: str, error: Message | Body) -> bytes:
    return _pack({"v": PROTOCOL_VERSION, "re": request_id, "boot": boot, "error": error})


def encode_notice(op: str, seq: int, boot: str, body: Message | Body) -> bytes:
    return _pack({"v": PROTOCOL_VERSION, "op": op, "seq": seq, "boot": boot, "body": body})


def decode(frame: bytes, *, max_items: int = MAX_ITEMS) -> Envelope:
    """Raise only `ProtocolError`, with the request id if it is readable."""
    if len(frame) > MAX_FRAME_BYTES:
        raise too_large(len(frame))
    fields = unpack_map(frame, max_items=max_items)
    kind: type[Envelope] = Notice
    if "re" in fields:
        kind = Reply
    elif "id" in fields:
        kind = RequestFrame
    if fields.get("v") != PROTOCOL_VERSION or type(fields["v"]) is not int:
        _refuse_version(fields)
    try:
        envelope: Envelope = msgspec.convert(fields, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise _wrong(fields, *field_and_reason(error)) from error
    if isinstance(envelope, Reply) and (
        ("ok" in fields) == ("error" in fields) or envelope.ok is envelope.error
    ):
        field = "error" if "error" in fields else "ok"
        raise _wrong(fields, field, "must be the only one of 'ok' and 'error'")
    return envelope


def _pack(fields: dict[str, Any]) -> bytes:
    frame = _encode(fields)
    if len(frame) > MAX_FRAME_BYTES:
        raise too_large(len(frame))
    return frame


def too_large(num_bytes: int, limit_bytes: int = MAX_FRAME_BYTES) -> ProtocolError:
    return ProtocolError(
        f"message of {num_bytes} bytes is over the limit of {limit_bytes}",
        code=ErrorCode.TOO_LARGE,
        size_bytes=num_bytes,
        limit_bytes=limit_bytes,
    )


def _refuse_version(fields: dict[str, Any]) -> NoReturn:
    version = fields.get("v")
    if type(version) is not int:
        raise _wrong(fields, "v", "must be an integer")
    raise ProtocolError(
        f"message speaks version {version}, this side speaks {PROTOCOL_VERSION}",
        code=ErrorCode.UNSUPPORTED_VERSION,
        request_id=readable_id(fields),
        theirs=version,
        ours=PROTOCOL_VERSION,
    )


def _wrong(fields: dict[str, Any], field: str, problem: str) -> ProtocolError:
    message = f"field '{field}' of the envelope {problem}"
    return ProtocolError(message, request_id=readable_id(fields), field=field)


def unpack_map(frame: bytes, *, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Raise only `ProtocolError`, for any bytes."""
    # An item takes at least one byte, so a short frame needs no count.
    if len(frame) > max_items and num_items(frame, max_items) > max_items:
        raise ProtocolError(
            f"message has more than {max_items} items", code=ErrorCode.TOO_LARGE, limit=max_items
        )
    try:
        fields = _unpack(frame, object_pairs_hook=_map_of)
    except _RepeatedKeyError as error:
        raise _repeated(frame, str(error)) from error
    except Exception as error:  # msgpack documents no closed set; each means "not a message"
        raise ProtocolError(f"frame is not msgpack: {type(error).__name__}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("frame is not a map")
    return fields


def readable_id(fields: dict[str, Any]) -> int | None:
    request_id = fields.get("id")
    return request_id if type(request_id) is int and request_id >= 0 else None


class _RepeatedKeyError(Exception):
    """Raised in msgpack's hook, with the repeated key."""


_unpack = partial(msgpack.unpackb, raw=False, strict_map_key=True, max_ext_len=0)


def _map_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _RepeatedKeyError(key)
    return fields


def _repeated(frame: bytes, key: str) -> ProtocolError:
    request_id = None
    with suppress(Exception):  # what follows the repeated key may be no msgpack
        fields = _unpack(frame)  # again without the hook, for the request id of the reply
        request_id = readable_id(fields) if isinstance(fields, dict) else None
    return ProtocolError(
        f"key '{key[:64]}' is there twice", code=ErrorCode.INVALID, request_id=request_id
    )


# The first byte of an item has its size, or the number of bytes that hold the size. Items follow
# each other in the bytes, also nested ones, so counting needs no stack:
#
#     _SIZES      bytes of the whole item; for arrays and maps, of their header
#     _CHILDREN   number of items that follow as its content
#     _LENGTHS    bytes of the length of a string or of binary
#     _COUNTS     bytes of the count of an array or of a map
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


def num_items(frame: bytes, most: int = MAX_ITEMS) -> int:
    """Return the number of items that array and map headers announce, up to ``most``.

    Stop too at extension types, which are refused anyway. Takes about 0.1 µs an item.
    """
    at, num_left, total = 0, 1, 0
    sizes, children = _SIZES, _CHILDREN
    while num_left and at < len(frame) and total <= most:
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
