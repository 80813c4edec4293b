"""The envelope of every frame: a msgpack map, and what it takes to trust one.

Refuses a frame that is too large, is not a map with string keys, speaks another version, or lacks
a field; each refusal is a `ProtocolError` that keeps the request id where one could be read.

One frame is one message. Four kinds exist, told apart by their keys:

    request   v, op, id, boot, secret, body  asks; gets exactly one reply
    reply     v, re, boot, ok | error        answers the request with that id
    notice    v, op, seq, boot, body         agent to engine, unasked; acknowledged by ``ack``
    event     v, op, seq, boot, body         on PUB, behind a topic frame; never acknowledged
"""

from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import msgpack
import msgspec

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.protocol.message import Discreet, Message, to_body
from kvbus.protocol.unpack import readable_id, unpack_map

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_PEER_REQUEST_BYTES = 4 * 1024 * 1024
"""Of a request on the peer socket, where strangers may ask; replies are frames like others."""
MAX_ID = 2**64 - 1

Body = Mapping[str, Any]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Secret = Annotated[str, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0)]
"""At most `MAX_ID`: msgpack has no larger one."""


class RequestFrame(Discreet, frozen=True, rename={"request_id": "id"}):
    """Asks for ``op``; ``request_id`` is unique within the sender's ``boot``.

    ``secret`` tells the sender from others that know its boot id; empty, its connection does.
    """

    op: Name
    request_id: Number
    boot: Name
    body: Body
    secret: Secret = ""


class Reply(Discreet, frozen=True, rename={"request_id": "re"}):
    """The one answer to ``request_id``: ``ok``, or ``error`` with code, message and detail."""

    request_id: Number
    boot: Name
    ok: Body | None = None
    error: Body | None = None


class Notice(Discreet, frozen=True):
    """Unasked message with a per-boot ``seq``: to an engine, or to all subscribers as an event."""

    op: Name
    seq: Number
    boot: Name
    body: Body


Envelope = RequestFrame | Reply | Notice


def encode_request(
    op: str, request_id: int, boot: str, body: Message | Body, *, secret: str = ""
) -> bytes:
    """The frame of a request; raises `ProtocolError` when it would be larger than a frame may."""
    fields = {"v": PROTOCOL_VERSION, "op": op, "id": request_id, "boot": boot, "body": body}
    return _pack(fields | {"secret": secret} if secret else fields)


def encode_reply(request_id: int, boot: str, ok: Message | Body) -> bytes:
    """The frame of a reply that has what was asked for."""
    return _pack({"v": PROTOCOL_VERSION, "re": request_id, "boot": boot, "ok": ok})


def encode_refusal(request_id: int, boot: str, error: Message | Body) -> bytes:
    """The frame of a reply that refuses."""
    return _pack({"v": PROTOCOL_VERSION, "re": request_id, "boot": boot, "error": error})


def encode_notice(op: str, seq: int, boot: str, body: Message | Body) -> bytes:
    """The frame of a notice or of an event."""
    return _pack({"v": PROTOCOL_VERSION, "op": op, "seq": seq, "boot": boot, "body": body})


def decode(frame: bytes) -> Envelope:
    """The envelope in ``frame``; raises `ProtocolError` and nothing else, whatever the bytes."""
    if len(frame) > MAX_FRAME_BYTES:
        raise too_large(len(frame))
    fields = unpack_map(frame)
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
        field = str(error).rsplit("`", 2)[1].removeprefix("$.")
        raise _wrong(fields, field, str(error)) from error
    if isinstance(envelope, Reply) and (
        ("ok" in fields) == ("error" in fields) or envelope.ok is envelope.error
    ):
        field = "error" if "error" in fields else "ok"
        raise _wrong(fields, field, "a reply has exactly one of 'ok' and 'error'")
    return envelope


def _pack(fields: dict[str, Any]) -> bytes:
    frame: bytes = msgpack.packb(fields, default=to_body)
    if len(frame) > MAX_FRAME_BYTES:
        raise too_large(len(frame))
    return frame


def too_large(num_bytes: int, limit_bytes: int = MAX_FRAME_BYTES) -> ProtocolError:
    """What is said of a frame that is over a limit."""
    return ProtocolError(
        f"message of {num_bytes} bytes is over the limit of {limit_bytes}",
        code=ErrorCode.TOO_LARGE,
        size_bytes=num_bytes,
        limit_bytes=limit_bytes,
    )


def _refuse_version(fields: dict[str, Any]) -> NoReturn:
    version = fields.get("v")
    if type(version) is not int:
        raise _wrong(fields, "v", "Expected `int`")
    raise ProtocolError(
        f"message speaks version {version}, this side speaks {PROTOCOL_VERSION}",
        code=ErrorCode.UNSUPPORTED_VERSION,
        request_id=readable_id(fields),
        theirs=version,
        ours=PROTOCOL_VERSION,
    )


def _wrong(fields: dict[str, Any], field: str, problem: str) -> ProtocolError:
    message = f"field '{field}' of the envelope: {problem}"
    return ProtocolError(message, request_id=readable_id(fields), field=field)
