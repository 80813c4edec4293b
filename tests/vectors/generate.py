"""Writes the golden vectors: ``python -m tests.vectors.generate`` from the root of the repository.

Refuses to decide what changed: a vector that is different means that the wire is.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.memory.attach import encode_error, encode_frame
from kvbus.protocol import EVENTS as EVENT_KINDS
from kvbus.protocol import (
    ErrorBody,
    Message,
    encode_notice,
    encode_refusal,
    encode_reply,
    encode_request,
    to_body,
)
from tests.vectors import examples, refused_examples

FOLDER = Path(__file__).parent
Vector = dict[str, Any]
FIRST_ID = 7_205_759_403_792
"""As one that was chosen at random."""
UNIX_ROOMS = ("attach", "handover", "memory")


def files() -> Iterator[tuple[Path, str]]:
    """Every file of vectors and its text."""
    rooms: dict[str, list[Vector]] = {
        "attach": list(_attach()),
        "handover": list(_handover()),
        "memory": list(_memory()),
        **{room: list(_requests(room)) for room in examples.ROOMS if room not in UNIX_ROOMS},
        "notices": list(_notices()),
        "events": list(_events()),
        "errors": list(_errors()),
        "refused": list(_refused()),
    }
    for room, vectors in rooms.items():
        yield FOLDER / f"{room}.json", json.dumps(vectors, indent=1) + "\n"


def secret_of(boot: str) -> str:
    """The secret of the example session that has this boot id."""
    return boot[::-1]


def _attach() -> Iterator[Vector]:
    for kind, (request, reply) in examples.ROOMS["attach"].items():
        asked = {"op": kind.op, "body": to_body(request)}
        num_fds = 1 if kind.op == "segment" else 0
        frame = encode_frame(asked)
        yield _vector(request, "attach", frame, frame[4:], num_fds=num_fds)
        frame = encode_frame({"ok": to_body(reply)})
        yield _vector(reply, "attach", frame, frame[4:], num_fds=0)
    error = ProtocolError("a segment comes with one descriptor, this one with 0")
    frame = encode_error(error)
    body = ErrorBody(code=error.code, message=error.message, detail=error.detail)
    yield _vector(body, "attach", frame, frame[4:], num_fds=0)


def _handover() -> Iterator[Vector]:
    for kind, (request, reply) in examples.ROOMS["handover"].items():
        frame = encode_frame({"op": kind.op, "body": to_body(request)})
        yield _vector(request, "attach", frame, frame[4:], num_fds=0)
        frame = encode_frame({"ok": to_body(reply)})
        num_fds = 2 if kind.op == "hand_over" else 0
        yield _vector(reply, "attach", frame, frame[4:], num_fds=num_fds)


def _memory() -> Iterator[Vector]:
    for kind, (request, reply) in examples.ROOMS["memory"].items():
        frame = encode_frame({"op": kind.op, "body": to_body(request)})
        yield _vector(request, "attach", frame, frame[4:], num_fds=0)
        frame = encode_frame({"ok": to_body(reply)})
        num_fds = len(to_body(reply)["segments"])
        yield _vector(reply, "attach", frame, frame[4:], num_fds=num_fds)


def _requests(room: str) -> Iterator[Vector]:
    boot = examples.DECODE_BOOT if room == "peer" else examples.ENGINE_BOOT
    for number, (kind, pair) in enumerate(examples.ROOMS[room].items(), start=FIRST_ID):
        request, reply = pair
        frame = encode_request(kind.op, number, boot, request, secret=secret_of(boot))
        yield _vector(request, "request", frame, frame)
        frame = encode_reply(number, examples.PREFILL_BOOT, reply)
        yield _vector(reply, "reply", frame, frame, answers=kind.__name__)
    if room == "engine":
        yield from _two_ranks()


def _two_ranks() -> Iterator[Vector]:
    """Each session of an engine of two ranks registers under a boot id of its own."""
    for boot, register in examples.TWO_RANKS.items():
        frame = encode_request(register.op, FIRST_ID, boot, register, secret=secret_of(boot))
        yield _vector(register, "request", frame, frame)


def _notices() -> Iterator[Vector]:
    for seq, message in enumerate(examples.NOTICES.values(), start=1):
        frame = encode_notice(message.op, seq, examples.DECODE_BOOT, message)
        yield _vector(message, "notice", frame, frame)


def _events() -> Iterator[Vector]:
    for op in EVENT_KINDS:
        message = examples.EVENTS[op]
        boot = examples.DECODE_BOOT if op.startswith("fetch.") else examples.PREFILL_BOOT
        frame = encode_notice(op, 1, boot, message)
        yield _vector(message, "event", frame, frame, topic=op)


def _errors() -> Iterator[Vector]:
    for number, code in enumerate(ErrorCode, start=1):
        message = ErrorBody(code=code, message=f"example of {code}", detail={"field": "x", "n": 1})
        frame = encode_refusal(number, examples.PREFILL_BOOT, message)
        yield _vector(message, "reply", frame, frame)


def _refused() -> Iterator[Vector]:
    for each in refused_examples.refused():
        yield {
            "why": each.why,
            "socket": each.socket,
            "code": each.code,
            "before": [frame.hex() for frame in each.before],
            "frames": [frame.hex() for frame in each.frames],
        }


def _vector(message: Message, kind: str, frame: bytes, body: bytes, **more: object) -> Vector:
    return {
        "name": type(message).__name__,
        "kind": kind,
        **more,
        "message": _shown(msgpack.unpackb(body)),
        "frame": frame.hex(),
    }


def _shown(value: Any) -> Any:
    """As JSON can say it: bytes become ``{"hex": ...}``."""
    match value:
        case bytes():
            return {"hex": value.hex()}
        case dict():
            return {key: _shown(item) for key, item in value.items()}
        case list():
            return [_shown(item) for item in value]
    return value


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
