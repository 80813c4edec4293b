"""Writes ``docs/protocol.schema.json``: ``python docs/generate_schema.py``.

JSON Schema of all bodies, by the names of the page: bytes are base64 text, as JSON has none.
"""

import json
import re
from inspect import cleandoc
from itertools import chain
from typing import Any

import msgspec

from docs.generate_protocol import AGENT_TYPES, DOCS, SHARED, meanings, text_of
from kvbus.protocol.envelope import Notice, Reply, RequestFrame
from kvbus.protocol.message import (
    EVENTS,
    NOTICES,
    REQUESTS,
    ErrorBody,
    Message,
    Request,
)
from kvbus.protocol.ticket import Rendezvous, Ticket

PAGE = DOCS / "protocol.schema.json"
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def schema() -> str:
    """The whole file; ``x-`` says which body goes with which operation, and how that is asked."""
    kinds = [kind for kinds in REQUESTS.values() for kind in kinds.values()]
    replies = [kind.reply for kind in kinds]
    others: list[Any] = [*NOTICES.values(), *EVENTS.values(), RequestFrame, Reply, Notice]
    named = list(dict.fromkeys([*kinds, *replies, *others, ErrorBody, Ticket, Rendezvous]))
    _, components = msgspec.json.schema_components(named, ref_template="#/$defs/{name}")
    for component in components.values():
        if text := component.get("description"):
            component["description"] = cleandoc(text)  # Python 3.13 removes the indentation
    for kind in (*named, *AGENT_TYPES, *chain.from_iterable(SHARED.values())):
        component, words = components[kind.__name__], meanings(kind)
        component |= {"description": _plain(text_of(kind))} if kind.__doc__ else {}
        for name, described in component["properties"].items():
            if text := words.get(name):
                described["description"] = _plain(text)
    page = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvbus protocol, version 1, draft",
        "x-requests": {
            socket: {op: _request(kind) for op, kind in kinds.items()}
            for socket, kinds in REQUESTS.items()
        },
        "x-notices": {op: _ref(kind) for op, kind in NOTICES.items()},
        "x-events": {op: _ref(kind) for op, kind in EVENTS.items()},
        "$defs": dict(sorted(components.items())),
    }
    return json.dumps(page, indent=1) + "\n"


def _request(kind: type[Request[Any]]) -> dict[str, Any]:
    return {
        "body": _ref(kind),
        "ok": _ref(kind.reply),
        "refusals": list(kind.refusals),
        "roles": sorted(kind.allowed_roles),
    }


def _plain(text: str) -> str:
    """Return the text without the targets of its links, which are headings of the pages."""
    return LINK.sub(r"\1", text)


def _ref(kind: type[Message]) -> dict[str, str]:
    return {"$ref": f"#/$defs/{kind.__name__}"}


if __name__ == "__main__":
    PAGE.write_text(schema())
