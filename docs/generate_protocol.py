"""Writes the tables of ``docs/protocol.md``: ``python docs/generate_protocol.py``.

Types, ranges and defaults come from the structs, meanings from ``protocol_fields.toml`` beside
this file. Refuses a field without a meaning, and a meaning without a field.
"""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from kvbus.errors import ErrorCode
from kvbus.geometry import (
    Axis,
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    RankSpec,
    Region,
    Segment,
    SlotOrder,
    StatePart,
)
from kvbus.protocol import attach, engine, events, peer, status, trace
from kvbus.protocol.message import Empty, ErrorBody, Message, Request
from kvbus.protocol.ticket import Rendezvous, Ticket

FOLDER = Path(__file__).parent
PAGE = FOLDER / "protocol.md"
WORDS: dict[str, dict[str, str]] = tomllib.loads((FOLDER / "protocol_fields.toml").read_text())
SHARED = (
    EngineSpec,
    GroupSpec,
    StatePart,
    RankSpec,
    Segment,
    Region,
    Axis,
    BlockTable,
    Box,
    SlotOrder,
    engine.AgentRanks,
    peer.EngineMemory,
    attach.MemorySocket,
    attach.LentSegment,
    status.Sharing,
    status.PeerView,
    engine.StageTimes,
    trace.Span,
    trace.OtherAgent,
)
ROOMS: dict[str, tuple[type[Request[Any]], ...]] = {
    "attach": attach.ATTACH_REQUESTS,
    "engine": engine.ENGINE_REQUESTS,
    "prefill": engine.PREFILL_REQUESTS,
    "decode": engine.DECODE_REQUESTS,
    "peer": tuple(dict.fromkeys(peer.PREFILL_PEER_REQUESTS + peer.DECODE_PEER_REQUESTS)),
    "memory": attach.MEMORY_REQUESTS,
}
EVENT_KINDS = tuple(dict.fromkeys(events.EVENTS.values()))


class Undocumented(Exception):
    """A struct and ``protocol_fields.toml`` do not name the same fields or codes."""


def page(text: str) -> str:
    """``text`` with everything between its markers made anew."""
    for name, lines in _sections():
        start, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        if not rest or end not in rest:
            raise Undocumented(f"the page has no markers for '{name}'")
        text = f"{before}{start}\n" + "\n".join(lines) + "\n\n" + rest[rest.index(end) :]
    return text


def _sections() -> Iterator[tuple[str, list[str]]]:
    for room, requests in ROOMS.items():
        yield room, [line for kind in requests for line in _request(kind)]
    yield "notices", [line for kind in engine.NOTICES for line in _message(kind)]
    yield "events", [line for kind in EVENT_KINDS for line in _event(kind)]
    yield "types", [line for kind in SHARED for line in _struct(kind)]
    yield "ticket", list(_table(Ticket))
    yield "rendezvous", list(_table(Rendezvous))
    yield "error", list(_table(ErrorBody))
    yield "codes", list(_codes())


def _request(kind: type[Request[Any]]) -> Iterator[str]:
    yield from _message(kind)
    reply = kind.reply
    if reply is Empty:
        yield from ("Reply: an empty map.", "")
    else:
        yield from (f"Reply, `{reply.__name__}`:", "")
        yield from _table(reply)
    codes = WORDS["refusals"][kind.__name__].split()
    yield f"Refusals of its own: {', '.join(f'`{ErrorCode(code)}`' for code in codes) or 'none'}."
    yield ""


def _message(kind: type[Message]) -> Iterator[str]:
    yield from (f"#### `{kind.op}`", "", WORDS["messages"][kind.__name__], "")
    yield from _table(kind)


def _event(kind: type[Message]) -> Iterator[str]:
    ops = ", ".join(f"`{op}`" for op, event in events.EVENTS.items() if event is kind)
    yield from (f"#### {ops}", "", WORDS["messages"][kind.__name__], "")
    yield from _table(kind)


def _struct(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield from (f"#### {kind.__name__}", "", WORDS["messages"][kind.__name__], "")
    yield from _table(kind)


def _table(kind: type[msgspec.Struct]) -> Iterator[str]:
    fields, words = msgspec.structs.fields(kind), WORDS.get(kind.__name__, {})
    if {field.name for field in fields} != set(words):
        raise Undocumented(f"{kind.__name__}: {sorted({f.name for f in fields} ^ set(words))}")
    if not fields:
        yield from ("No fields.", "")
        return
    yield from ("| field | type and range | when absent | meaning |", "| --- | --- | --- | --- |")
    described = types.type_info(kind)
    assert isinstance(described, types.StructType)  # noqa: S101  every struct is described as one
    for field in described.fields:
        absent = "required" if field.required else _default(field)
        yield f"| `{field.name}` | {type_name(field.type)} | {absent} | {words[field.name]} |"
    yield ""


def _codes() -> Iterator[str]:
    when, then = WORDS["codes"], WORDS["remedies"]
    known = {code.value for code in ErrorCode}
    if differing := (set(when) ^ known) | (set(then) ^ known):
        raise Undocumented(f"codes: {sorted(differing)}")
    yield from ("| code | when | what the caller should do |", "| --- | --- | --- |")
    yield from (f"| `{code.value}` | {when[code]} | {then[code]} |" for code in ErrorCode)


def _default(field: types.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value: Any = field.default_factory()
    else:
        value = field.default
    match value:
        case None:
            return "nil"
        case bool():
            return str(value).lower()
        case tuple():
            return "[" + ", ".join(f'"{item}"' for item in value) + "]"
        case msgspec.Struct():
            return "all 0"
        case str():
            return f'"{value}"'
    return str(value)


def type_name(of: types.Type) -> str:  # noqa: PLR0911  one return a kind of type
    """A type as a person reads it, with its range."""
    match of:
        case types.UnionType(options):
            return " or ".join(map(type_name, options))
        case types.StructType(cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case types.EnumType(cls):
            if cls is ErrorCode:
                return "an [error code](#error-codes)"
            return "one of " + ", ".join(f'"{word.value}"' for word in cls)
        case types.LiteralType(values):
            return "one of " + ", ".join(f'"{value}"' for value in values)
        case types.DictType(key, value):
            most = f", at most {of.max_length}" if of.max_length else ""
            return f"map of {type_name(key)} to {type_name(value)}{most}"
        case types.VarTupleType(item):
            return f"list of {_range(of, 'items')}: {type_name(item)}"
        case types.IntType():
            return f"integer {_bounds(of)}".strip()
        case types.FloatType():
            return f"number {_bounds(of)}".strip()
        case types.StrType() if of.pattern:
            return f"tcp://HOST:PORT, {_range(of, 'characters')}"
        case types.StrType():
            return f"string {_range(of, 'characters')}".strip()
        case types.BytesType():
            return f"bin {_range(of, 'bytes')}".strip()
    simple = {types.BoolType: "bool", types.NoneType: "nil", types.AnyType: "any value"}
    return simple[type(of)]


def _bounds(of: types.IntType | types.FloatType) -> str:
    low = f"over {of.gt:g}" if of.gt is not None else f"from {of.ge}" if of.ge is not None else ""
    return f"{low} to {_power(of.le)}" if of.le is not None else low


def _power(number: float) -> str:
    for bits in (31, 62, 63):
        if number in {2**bits, 2**bits - 1}:
            return f"2^{bits}" + (" - 1" if number == 2**bits - 1 else "")
    return f"{number:,}"


def _range(of: types.StrType | types.BytesType | types.VarTupleType, what: str) -> str:
    low, high = of.min_length, of.max_length
    if high is None:
        return "any number of items" if what == "items" and not low else ""
    return f"of {low or 0} to {high:,} {what}" if what != "items" else f"{low or 0} to {high:,}"


def documented() -> Iterable[str]:
    """The names of all structs that the page describes."""
    requests = [kind for kinds in ROOMS.values() for kind in kinds]
    kinds: list[type[msgspec.Struct]] = [*requests, *engine.NOTICES, *EVENT_KINDS, *SHARED]
    kinds += [Ticket, Rendezvous, ErrorBody]
    replies = [kind.reply for kind in requests]
    return {kind.__name__ for kind in [*kinds, *replies]}


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
