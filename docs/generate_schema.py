"""Writes ``docs/protocol.schema.json``: ``python docs/generate_schema.py``.

JSON Schema of all bodies, by the names of the page: bytes are base64 text, as JSON has none.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from kvbus.protocol import attach, engine, events, peer
from kvbus.protocol.envelope import Notice, Reply, RequestFrame
from kvbus.protocol.message import ErrorBody, Message, Request
from kvbus.protocol.ticket import Rendezvous, Ticket

PAGE = Path(__file__).with_name("protocol.schema.json")
REQUESTS: dict[str, tuple[type[Request[Any]], ...]] = {
    "attach": attach.ATTACH_REQUESTS,
    "engine": engine.ENGINE_REQUESTS,
    "prefill": engine.PREFILL_REQUESTS,
    "decode": engine.DECODE_REQUESTS,
    "prefill_peer": peer.PREFILL_PEER_REQUESTS,
    "decode_peer": peer.DECODE_PEER_REQUESTS,
    "memory": attach.MEMORY_REQUESTS,
}


def schema() -> str:
    """The whole file; ``x-`` says which body goes with which operation."""
    kinds = [kind for kinds in REQUESTS.values() for kind in kinds]
    replies = [kind.reply for kind in kinds]
    others: list[Any] = [*engine.NOTICES, *events.EVENTS.values(), RequestFrame, Reply, Notice]
    named = list(dict.fromkeys([*kinds, *replies, *others, ErrorBody, Ticket, Rendezvous]))
    _, components = msgspec.json.schema_components(named, ref_template="#/$defs/{name}")
    page = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvbus protocol, version 1",
        "x-requests": {room: _requests(kinds) for room, kinds in REQUESTS.items()},
        "x-notices": {kind.op: _ref(kind) for kind in engine.NOTICES},
        "x-events": {op: _ref(kind) for op, kind in events.EVENTS.items()},
        "$defs": dict(sorted(components.items())),
    }
    return json.dumps(page, indent=1) + "\n"


def _requests(kinds: tuple[type[Request[Any]], ...]) -> dict[str, Any]:
    return {kind.op: {"body": _ref(kind), "ok": _ref(kind.reply)} for kind in kinds}


def _ref(kind: type[Message]) -> dict[str, str]:
    return {"$ref": f"#/$defs/{kind.__name__}"}


if __name__ == "__main__":
    PAGE.write_text(schema())
