"""Writes ``examples/c/protocol.h``: ``python docs/generate_header.py``.

Names and limits of the protocol for engines in C: operations with their fields, notices, codes.
"""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from docs.generate_protocol import code_texts
from kvbus.protocol import envelope, ticket
from kvbus.protocol.message import NOTICES, REQUESTS, Message, Socket

HEADER = Path(__file__).parent.parent / "examples" / "c" / "protocol.h"
SECTIONS = {
    Socket.ATTACH: "Attach socket",
    Socket.ENGINE: "Engine socket, of all agents",
    Socket.PREFILL: "Engine socket of a prefill agent",
    Socket.DECODE: "Engine socket of a decode agent",
}
LIMITS = {
    "PROTOCOL_VERSION": envelope.PROTOCOL_VERSION,
    "TICKET_VERSION": ticket.TICKET_VERSION,
    "MAX_FRAME_BYTES": envelope.MAX_FRAME_BYTES,
    "MAX_ITEMS": envelope.MAX_ITEMS,
}


def header() -> str:
    """The whole file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "/* Names of docs/protocol-engine.md. Generated: python docs/generate_header.py */"
    yield "#pragma once"
    yield from ("", "enum {", *(f"    KVBUS_{name} = {n}," for name, n in LIMITS.items()), "};")
    for socket, title in SECTIONS.items():
        yield from ("", f"/* {title}: requests and replies */", "")
        for op, kind in REQUESTS[socket].items():
            yield from _define("OP", op, f"{_fields(kind)} -> {_fields(kind.reply)}")
    yield from ("", "/* Notices of the agent */", "")
    for op, notice in NOTICES.items():
        yield from _define("NOTICE", op, _fields(notice))
    yield from ("", "/* Error codes */", "")
    for code, text in code_texts().items():
        yield from _define("CODE", code, text.partition(" Do: ")[0])


def _define(kind: str, name: str, comment: str) -> Iterator[str]:
    yield from wrap(f"/* {comment} */", 110, subsequent_indent="   ", break_on_hyphens=False)
    yield f'#define KVBUS_{kind}_{name.upper()} "{name}"'


def _fields(kind: type[Message]) -> str:
    """The names of the fields; in brackets those that may be left out."""
    needed = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    names = kind.__struct_fields__[:needed] + tuple(
        f"[{name}]" for name in kind.__struct_fields__[needed:]
    )
    return ", ".join(names) or "nothing"


if __name__ == "__main__":
    HEADER.write_text(header())
