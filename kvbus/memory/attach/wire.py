"""The bytes of attach messages: frames, bodies, replies.

Refuses what is too large or not a map with string keys. Knows no socket.
"""

from typing import Any

import msgpack

from kvbus.errors import ErrorCode, KVBusError, ProtocolError
from kvbus.protocol.envelope import unpack_map
from kvbus.protocol.message import error_body, refusal

LENGTH_BYTES = 4
MAX_BODY_BYTES = 65_536
MAX_FDS = 64


def encode_frame(message: dict[str, Any]) -> bytes:
    """Return length and body; ``ProtocolError`` when it is too large or no msgpack."""
    try:
        body: bytes = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"an attach message cannot be encoded: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise _too_large(len(body))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_length(header: bytes) -> int:
    """Return how long the body is; ``ProtocolError`` when nobody would read that much."""
    length = int.from_bytes(header, "little")
    if length > MAX_BODY_BYTES:
        raise _too_large(length)
    return length


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the map; ``ProtocolError`` for anything else."""
    message = unpack_map(body)
    if not all(isinstance(key, str) for key in message):  # bin is a key to msgpack as well
        raise ProtocolError("an attach message must be a map with string keys")
    return message


def encode_error(error: KVBusError) -> bytes:
    """Return the frame of an error reply; detail that does not fit is left out."""
    body = error_body(error)
    try:
        return encode_frame({"error": body})
    except ProtocolError:
        return encode_frame({"error": {**body, "detail": {}}})


def open_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """Return what ``ok`` holds, or raise ``RequestRefused``; ``ProtocolError`` if it is neither."""
    match reply:
        case {"ok": dict(answer)}:
            return answer
        case {"error": dict(body)}:
            raise refusal(body)
    raise ProtocolError("an attach reply holds neither 'ok' nor 'error'")


def _too_large(length: int) -> ProtocolError:
    return ProtocolError(
        f"an attach message of {length} bytes exceeds {MAX_BODY_BYTES}",
        code=ErrorCode.TOO_LARGE,
        length_bytes=length,
    )
