"""The envelope of every frame: a msgpack map, and what it takes to trust one.

Refuses a frame that is too large, is not a map with string keys, speaks another version, or lacks
a field; each refusal is a `ProtocolError` that keeps the request id where one could be read.

One frame is one message. Four kinds exist, told apart by their keys:

    request   v, op, id, boot, body      asks; gets exactly one reply
    reply     v, re, boot, ok | error    answers the request with that id
    notice    v, op, seq, boot, body     agent to engine, unasked; acknowledged by ``ack``
    event     v, op, seq, boot, body     on PUB, behind a topic frame; a hint, never acknowledged
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from kvbus.errors import ErrorCode, ProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_ID = 2**64 - 1
MAX_BOOT_CHARS = 64
MAX_OP_CHARS = 64

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for ``op``; ``request_id`` is unique within the sender's ``boot``."""

    op: str
    request_id: int
    boot: str
    body: Body


@dataclass(frozen=True, slots=True)
class Reply:
    """The one answer to ``request_id``: ``ok``, or ``error`` with code, message and detail."""

    request_id: int
    boot: str
    ok: Body | None = None
    error: Body | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Unasked message with a per-boot ``seq``: to an engine, or to all subscribers as an event."""

    op: str
    seq: int
    boot: str
    body: Body


Envelope = Request | Reply | Notice


def encode_request(request: Request) -> bytes:
    """The frame of a request; raises `ProtocolError` when it would be larger than a frame may."""
    return _pack(
        {
            "v": PROTOCOL_VERSION,
            "op": request.op,
            "id": request.request_id,
            "boot": request.boot,
            "body": request.body,
        }
    )


def encode_reply(reply: Reply) -> bytes:
    """The frame of a reply, with ``error`` when it has one and ``ok`` otherwise."""
    outcome = {"ok": reply.ok or {}} if reply.error is None else {"error": reply.error}
    return _pack(
        {"v": PROTOCOL_VERSION, "re": reply.request_id, "boot": reply.boot, **outcome},
    )


def encode_notice(notice: Notice) -> bytes:
    """The frame of a notice or of an event."""
    return _pack(
        {
            "v": PROTOCOL_VERSION,
            "op": notice.op,
            "seq": notice.seq,
            "boot": notice.boot,
            "body": notice.body,
        }
    )


def decode(frame: bytes) -> Envelope:
    """The envelope in ``frame``; raises `ProtocolError` and nothing else, whatever the bytes."""
    fields = _unpack(frame)
    request_id = _readable_id(fields)
    try:
        return _envelope(fields)
    except ProtocolError as error:
        error.request_id = request_id
        raise


def _pack(fields: dict[str, Any]) -> bytes:
    frame: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"message of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}",
            code=ErrorCode.TOO_LARGE,
            size_bytes=len(frame),
            limit_bytes=MAX_FRAME_BYTES,
        )
    return frame


def _unpack(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}",
            code=ErrorCode.TOO_LARGE,
            size_bytes=len(frame),
            limit_bytes=MAX_FRAME_BYTES,
        )
    try:
        fields = msgpack.unpackb(frame, raw=False, strict_map_key=True, max_ext_len=0)
    except Exception as error:  # msgpack documents no closed set; every one means "not a message"
        raise ProtocolError(f"frame is not msgpack: {type(error).__name__}") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise ProtocolError("frame is not a map with string keys")
    return fields


def _envelope(fields: dict[str, Any]) -> Envelope:
    version = _integer(fields, "v")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"message speaks version {version}, this side speaks {PROTOCOL_VERSION}",
            code=ErrorCode.UNSUPPORTED_VERSION,
            theirs=version,
            ours=PROTOCOL_VERSION,
        )
    boot = _string(fields, "boot", MAX_BOOT_CHARS)
    if "re" in fields:
        return _reply(fields, boot)
    op = _string(fields, "op", MAX_OP_CHARS)
    body = _map(fields, "body")
    if "id" in fields:
        return Request(op, _integer(fields, "id"), boot, body)
    return Notice(op, _integer(fields, "seq"), boot, body)


def _reply(fields: dict[str, Any], boot: str) -> Reply:
    request_id = _integer(fields, "re")
    if ("ok" in fields) == ("error" in fields):
        raise ProtocolError("reply needs exactly one of 'ok' and 'error'")
    if "ok" in fields:
        return Reply(request_id, boot, ok=_map(fields, "ok"))
    return Reply(request_id, boot, error=_map(fields, "error"))


def _readable_id(fields: dict[str, Any]) -> int | None:
    request_id = fields.get("id")
    return request_id if type(request_id) is int and 0 <= request_id <= MAX_ID else None


def _integer(fields: dict[str, Any], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise ProtocolError(f"field '{key}' must be an unsigned integer", field=key)
    return value


def _string(fields: dict[str, Any], key: str, max_chars: int) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= max_chars:
        raise ProtocolError(
            f"field '{key}' must be a string of 1 to {max_chars} characters", field=key
        )
    return value


def _map(fields: dict[str, Any], key: str) -> dict[str, Any]:
    value = fields.get(key)
    if not isinstance(value, dict):
        raise ProtocolError(f"field '{key}' must be a map", field=key)
    return value
