"""Writes the tables of ``docs/protocol.md``: ``python docs/generate_protocol.py``.

All is said where a message is declared: types, ranges and defaults by its fields, what they mean by
the strings below them. Refuses a field, a type or an error code without such a string.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from kvbus import geometry
from kvbus.errors import ErrorCode
from kvbus.protocol import attach, engine, peer, status, trace
from kvbus.protocol.message import (
    EVENTS,
    NOTICES,
    REQUESTS,
    Empty,
    ErrorBody,
    Request,
    Role,
    Socket,
)
from kvbus.protocol.ticket import Rendezvous, Ticket

PAGE = Path(__file__).with_name("protocol.md")
SHARED: tuple[type[msgspec.Struct], ...] = (
    geometry.EngineSpec,
    geometry.GroupSpec,
    geometry.StatePart,
    geometry.RankSpec,
    geometry.Segment,
    geometry.Region,
    geometry.Axis,
    geometry.BlockTable,
    geometry.Box,
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
SECTIONS: dict[str, tuple[Socket, ...]] = {
    "attach": (Socket.ATTACH,),
    "engine": (Socket.ENGINE,),
    "prefill": (Socket.PREFILL,),
    "decode": (Socket.DECODE,),
    "peer": (Socket.PREFILL_PEER, Socket.DECODE_PEER),
    "memory": (Socket.MEMORY,),
}
NAMING = ("message", "attach", "engine", "peer", "status", "ticket")
"""Where types of fields have names and strings below them."""


class Undocumented(Exception):
    """A field, a type or a code without a string that says what it means."""


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
    for name, sockets in SECTIONS.items():
        kinds = dict.fromkeys(kind for one in sockets for kind in REQUESTS[one].values())
        yield name, [line for kind in kinds for line in _request(kind)]
    yield "notices", [line for op, kind in NOTICES.items() for line in _struct(f"`{op}`", kind)]
    events = {kind: [op for op in EVENTS if EVENTS[op] is kind] for kind in EVENTS.values()}
    headings = {kind: ", ".join(f"`{op}`" for op in ops) for kind, ops in events.items()}
    yield "events", [line for kind, ops in headings.items() for line in _struct(ops, kind)]
    yield "types", [line for kind in SHARED for line in _struct(kind.__name__, kind)]
    yield "ticket", list(_table(Ticket))
    yield "rendezvous", list(_table(Rendezvous))
    yield "error", list(_table(ErrorBody))
    yield "codes", list(_codes())


def _request(kind: type[Request[Any]]) -> Iterator[str]:
    yield from _struct(f"`{kind.op}`", kind)
    if kind.reply is Empty:
        yield from ("Reply: an empty map.", "")
    else:
        yield from (f"Reply, `{kind.reply.__name__}`:", "")
        yield from _table(kind.reply)
    told = [f"Refusals of its own: {', '.join(f'`{one}`' for one in kind.refusals) or 'none'}."]
    if kind.askers:
        roles = [f"`{role}`" for role in Role if role in kind.askers]
        told.append(f"Keys that may ask it: {', '.join(roles)}.")
    if not kind.repeatable:
        told.append("It is not the same when it is done twice.")
    yield from (" ".join(told), "")


def _struct(heading: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    yield from (f"#### {heading}", "", text_of(kind), "")
    yield from _table(kind)


def _table(kind: type[msgspec.Struct]) -> Iterator[str]:
    described, words = types.type_info(kind), meanings(kind)
    assert isinstance(described, types.StructType)  # noqa: S101  every struct is described as one
    if not described.fields:
        yield from ("No fields.", "")
        return
    yield from ("| field | type and range | when absent | meaning |", "| --- | --- | --- | --- |")
    if missing := [field.name for field in described.fields if not words[field.name]]:
        raise Undocumented(f"{kind.__name__}: nothing says what {', '.join(missing)} means")
    for field in described.fields:
        absent = "required" if field.required else _default(field)
        yield f"| `{field.name}` | {type_name(field.type)} | {absent} | {words[field.name]} |"
    yield ""


def _codes() -> Iterator[str]:
    yield from ("| code | when | what the caller should do |", "| --- | --- | --- |")
    for code, text in code_texts().items():
        when, _, then = text.partition(" Do: ")
        if not then:
            raise Undocumented(f"nothing says when '{code}' comes, and what to do then")
        yield f"| `{code.value}` | {when} | {then[:1].upper()}{then[1:]} |"


def text_of(kind: type) -> str:
    """The string below a class, as the page has it."""
    return _line(kind.__doc__ or "")


def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What each field means: the string below it, or below its type; empty without either."""
    fields = _strings(kind.__module__)[kind.__name__]
    words = {
        name: text
        for module in NAMING
        for name, (_, text) in _strings(f"kvbus.protocol.{module}")[""].items()
    }
    return {
        name: text or words.get(annotation.removesuffix(" | None"), "")
        for name, (annotation, text) in fields.items()
        if name in kind.__struct_fields__
    }


def code_texts() -> dict[ErrorCode, str]:
    """Of each error code, when it comes and what the caller should do."""
    texts = _strings("kvbus.errors")["ErrorCode"]
    return {code: texts[code.name][1] for code in ErrorCode}


@cache
def _strings(module: str) -> dict[str, dict[str, tuple[str, str]]]:
    """By class, "" for the module itself: each name, its annotation, and the string below it."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    types_named = {one.name: ("", _line(ast.get_docstring(one) or "")) for one in classes}
    return {
        "": types_named | dict(_names(tree.body)),
        **{one.name: dict(_names(one.body)) for one in classes},
    }


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, str]]]:
    for statement, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(name), annotation=annotation):
                of = ast.unparse(annotation)
            case ast.Assign(targets=[ast.Name(name)]):
                of = ""
            case _:
                continue
        match below:
            case ast.Expr(ast.Constant(str(text))):
                yield name, (of, _line(text))
            case _:
                yield name, (of, "")


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


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


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
