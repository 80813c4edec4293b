"""The golden vectors: each has a frame, and its message as JSON, bytes as ``{"hex": ...}``."""

import json
from pathlib import Path
from typing import Any, TypeVar

from kvbus.memory.attach import encode_frame
from kvbus.protocol import Message, encode_notice, encode_refusal, encode_reply, encode_request
from kvbus.protocol import from_body as typed
from tests.unit.protocol.strategies import MESSAGES

FOLDER = Path(__file__).parent
KINDS = {kind.__name__: kind for kind in MESSAGES}
Vector = dict[str, Any]
M = TypeVar("M", bound=Message)


def read(room: str) -> list[Vector]:
    """The vectors of a file; their messages have bytes again."""
    vectors: list[Vector] = json.loads((FOLDER / f"{room}.json").read_text())
    return [_bytes_again(vector) for vector in vectors]


def written(vectors: list[Vector]) -> str:
    """The text of a file."""
    return json.dumps(_shown(vectors), indent=1) + "\n"


def rooms() -> list[str]:
    """The files of messages that are right."""
    others = "refused", "prompts"
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in others)


def body_in(message: Vector) -> Any:
    """Of a request, a reply or a notice."""
    return next(message[key] for key in ("body", "ok", "error") if key in message)


def frame_of(vector: Vector) -> bytes:
    """As the side that sends this message makes it."""
    message = vector["message"]
    boot, body = message.get("boot", ""), body_in(message)
    if vector["kind"] == "attach":
        return encode_frame(message)
    if vector["kind"] == "request":
        op, number = message["op"], message["id"]
        return encode_request(op, number, boot, body, secret=message["secret"])
    if vector["kind"] == "reply":
        encode = encode_refusal if "error" in message else encode_reply
        return encode(message["re"], boot, body)
    return encode_notice(message["op"], message["seq"], boot, body)


def example(kind: type[M]) -> M:
    """The first message of that kind, with every field set."""
    vectors = [one for room in rooms() for one in read(room) if one["name"] == kind.__name__]
    return typed(kind, body_in(vectors[0]["message"]))


def _bytes_again(value: Any) -> Any:
    match value:
        case {"hex": str(digits)} if len(value) == 1:
            return bytes.fromhex(digits)
        case dict():
            return {key: _bytes_again(item) for key, item in value.items()}
        case list():
            return [_bytes_again(item) for item in value]
    return value


def _shown(value: Any) -> Any:
    match value:
        case bytes():
            return {"hex": value.hex()}
        case dict():
            return {key: _shown(item) for key, item in value.items()}
        case list() | tuple():
            return [_shown(item) for item in value]
    return value
