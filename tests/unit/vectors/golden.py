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
    text = (FOLDER / f"{room}.json").read_text()
    vectors: list[Vector] = json.loads(text, object_hook=_bytes_again)
    return vectors


def written(vectors: list[Vector]) -> str:
    return json.dumps(vectors, indent=1, default=_shown) + "\n"


def rooms() -> list[str]:
    """The files of messages that are right."""
    others = "refused", "prompts"
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in others)


def body_in(message: Vector) -> Any:
    return next(message[key] for key in ("body", "ok", "error") if key in message)


def frame_of(vector: Vector) -> bytes:
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


def _bytes_again(fields: dict[str, Any]) -> Any:
    return bytes.fromhex(fields["hex"]) if fields.keys() == {"hex"} else fields


def _shown(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}
