"""Writes the lists of the protocol pages and ``errors.md``: ``python docs/generate_protocol.py``.

The source is the declaration of each message: types, ranges and defaults of its fields, and the
strings below them. A field needs no string if its name and type suffice; a message, a type and an
error code do.
"""

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from kvbus import geometry
from kvbus.errors import ErrorCode
from kvbus.protocol import attach, engine, peer, tools
from kvbus.protocol.message import (
    EVENTS,
    NOTICES,
    REQUESTS,
    Empty,
    Request,
    Role,
    Socket,
    may_subscribe,
)
from kvbus.protocol.ticket import Rendezvous

DOCS = Path(__file__).parent
PAGES = tuple(
    DOCS / name
    for name in ("protocol-engine.md", "protocol-agents.md", "protocol-tools.md", "errors.md")
)
SHARED: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "memory types": (
        geometry.EngineSpec,
        geometry.GroupSpec,
        geometry.StatePart,
        geometry.RankSpec,
        geometry.Segment,
        geometry.Region,
        geometry.Axis,
        geometry.BlockTable,
        engine.AgentRanks,
        engine.EndedOffer,
        engine.StageTimes,
    ),
    "tool types": (
        tools.Sharing,
        tools.PeerView,
        tools.Fault,
        tools.ProcessStatus,
        tools.PoolStatus,
        tools.Span,
        tools.OtherAgent,
    ),
}
AGENT_TYPES: tuple[type[msgspec.Struct], ...] = (
    geometry.Tile,
    peer.EngineMemory,
    peer.HeldOffer,
    attach.MemorySocket,
    attach.LentSegment,
    attach.LentCuda,
)
"""Types between agents, which the schema describes alone."""
SECTIONS: dict[str, tuple[Socket, ...]] = {
    "attach": (Socket.ATTACH,),
    "engine": (Socket.ENGINE,),
    "prefill": (Socket.PREFILL,),
    "decode": (Socket.DECODE,),
    "peer": (Socket.PREFILL_PEER, Socket.DECODE_PEER),
    "memory": (Socket.MEMORY,),
}
OF_AGENTS = ("peer", "memory")
"""Messages between agents: their fields are in the schema alone."""
TOOLS = frozenset((Role.ROUTER, Role.OBSERVER))
"""Roles whose requests are on the page for tools."""
FOR_SPANS = ("traceparent", "sent_s", "wanted_s")
"""Fields that only affect spans. One paragraph describes them."""
IN_COMMON = 2
"""A field that this many messages of a page share is described once."""
Kinds = list[type[msgspec.Struct]]
NAMED = {
    "name": "string of 1..256 characters",
    "text": "string of 0..4,096 characters",
    "secret": "string of 16..128 characters",
    "endpoint": "tcp://HOST:PORT of 0..256 characters",
    "index": "integer 0..2^31-1",
    "size": "integer 1..2^31-1",
    "count": "integer 0..2^63-1",
    "serial": "integer 1..2^63-1",
    "bytes": "integer 1..2^62",
    "seconds": "number over 0, ..86,400",
    "tables": "map of 0..64 `name` to [BlockTable](#blocktable)",
    "priority": "integer -2^31..2^31-1",
    "role": '"prefill" or "decode"',
    "outcome": '"completed", "failed", "cancelled", "withdrawn", "expired" or "parked"',
}
"""Types of fields by their names on the pages."""
NOTHING = ('""', "b''", "[]", "{}", "0", "0.0", "false", "all 0")
"""Defaults that the page shows by a question mark."""
NAMING = ("message", "attach", "engine", "peer", "tools", "ticket")
"""Where types of fields have names and strings below them."""
NO_REMEDY = "nothing."
LINK = re.compile(r"\]\(#([\w-]+)\)")


class Undocumented(Exception):
    """A field, a type or a code without a string that says what it means."""


def pages() -> dict[Path, str]:
    """Each page with all between its markers made again, and its links led to their pages."""
    sections, texts = dict(_sections()), {path: path.read_text() for path in PAGES}
    for path, written in texts.items():
        text = written
        for name in re.findall(r"<!-- generated: ([\w ]+) -->\n", written):
            before, _, rest = text.partition(f"<!-- generated: {name} -->\n")
            end = rest.index(f"<!-- end of {name} -->")
            made = (
                re.sub(r"\n{3,}", "\n\n", "\n".join(["", *sections.pop(name)])).rstrip("\n") + "\n"
            )
            text = f"{before}<!-- generated: {name} -->\n{made}\n{rest[end:]}"
        texts[path] = text
    if sections:
        raise Undocumented(f"no page has markers for {', '.join(sections)}")
    anchors = {anchor: path for path, text in texts.items() for anchor in anchors_of(text)}
    linked = {path: _linked(text, anchors) for path, text in texts.items()}
    return {path: text.replace(f"]({path.name}#", "](#") for path, text in linked.items()}


def anchors_of(text: str) -> set[str]:
    """What the headings of a page are linked to by."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings}


def _linked(text: str, anchors: dict[str, Path]) -> str:
    """``text`` with each link to a heading of another page of these led there."""
    here = anchors_of(text)

    def linked(found: re.Match[str]) -> str:
        anchor = found[1]
        if anchor in here or anchor not in anchors:
            return found[0]
        return f"]({anchors[anchor].name}#{anchor})"

    return LINK.sub(linked, text)


def _sections() -> Iterator[tuple[str, list[str]]]:
    asked = {name: _asked(*sockets) for name, sockets in SECTIONS.items()}
    asked["peer"] = [kind for kind in asked["peer"] if kind is not engine.Ping]
    asked["tools"] = [kind for kind in asked["peer"] if kind.allowed_roles & TOOLS]
    asked["peer"] = [kind for kind in asked["peer"] if kind not in asked["tools"]]
    events = {kind: [op for op in EVENTS if EVENTS[op] is kind] for kind in EVENTS.values()}
    for name in OF_AGENTS:
        yield name, [_summary(kind) for kind in asked[name]]
    pages: dict[str, tuple[tuple[str, ...], Kinds]] = {
        "engines": (
            ("attach", "engine", "prefill", "decode"),
            [*NOTICES.values(), *SHARED["memory types"]],
        ),
        "tools": (("tools",), [*events, *SHARED["tool types"], Rendezvous]),
    }
    everywhere: dict[str, str] = {}
    common: dict[str, dict[str, str]] = {}
    for page, (names, others) in pages.items():
        kinds = [kind for name in names for kind in asked[name]]
        here = _common([*kinds, *(kind.reply for kind in kinds), *others])
        common[page] = everywhere | here
        told = {name: line for name, line in here.items() if everywhere.get(name) != line}
        spans = _for_spans() if page == "engines" else {}
        everywhere = everywhere or here
        yield f"common of {page}", _items(told | spans)
        for name in names:
            yield name, [line for kind in asked[name] for line in _request(kind, common[page])]
    named = [(f"`{op}`", kind) for op, kind in NOTICES.items()]
    yield "notices", [line for op, kind in named for line in _struct(op, kind, common["engines"])]
    headings = {kind: ", ".join(f"`{op}`" for op in ops) for kind, ops in events.items()}
    tools = common["tools"]
    yield "events", [line for kind, ops in headings.items() for line in _struct(ops, kind, tools)]
    for (name, shared), page in zip(SHARED.items(), pages, strict=True):
        lines = [_struct(kind.__name__, kind, common[page]) for kind in shared]
        yield name, [line for each in lines for line in each]
    yield "rendezvous", list(_fields(Rendezvous, tools))
    yield "codes", list(_codes())
    yield "named", [f"- `{name}`: {what}" for name, what in NAMED.items()]
    yield "permissions", list(_permissions(asked["tools"]))


def _asked(*sockets: Socket) -> list[type[Request[Any]]]:
    """The requests of these sockets, each once."""
    return list(dict.fromkeys(kind for one in sockets for kind in REQUESTS[one].values()))


def _request(kind: type[Request[Any]], common: dict[str, str]) -> Iterator[str]:
    yield from _struct(f"`{kind.op}`", kind, common)
    if kind.reply is Empty:
        pass
    elif (first := _first_with(kind.reply)) is not kind:
        yield from (f"Reply: as of [`{first.op}`](#{first.op}).", "")
    else:
        yield from (f"Reply, `{kind.reply.__name__}`:", "")
        yield from _fields(kind.reply, common)
    yield ""


def _summary(kind: type[Request[Any]]) -> str:
    """One item for a message, with the names of its body and its reply in the schema."""
    reply = "" if kind.reply is Empty else f", reply `{kind.reply.__name__}`"
    return f"- `{kind.op}` (`{kind.__name__}`{reply}): {_described(kind)}"


def _permissions(kinds: Sequence[type[Request[Any]]]) -> Iterator[str]:
    yield from ("| role of the key | requests | events |", "| --- | --- | --- |")
    for role in Role:
        ops = ", ".join(f"`{kind.op}`" for kind in kinds if role in kind.allowed_roles)
        yield f"| `{role}` | {ops} | {'yes' if may_subscribe([role]) else 'no'} |"


def _first_with(reply: type[Any]) -> type[Request[Any]]:
    """The request whose reply is listed; others with the same lead there."""
    kinds = (kind for kinds in REQUESTS.values() for kind in kinds.values())
    return next(kind for kind in kinds if kind.reply is reply)


def _common(kinds: Kinds) -> dict[str, str]:
    """By its name, the line of each field that several of these describe alike, but for spans."""
    lines = Counter(line for kind in dict.fromkeys(kinds) for line in _lines(kind).items())
    often = {name: line for (name, line), num in lines.items() if num >= IN_COMMON and ": " in line}
    return {name: line for name, line in often.items() if name not in FOR_SPANS}


def _for_spans() -> dict[str, str]:
    """The line of each field for spans, as the first message with it has it."""
    lines = _lines(engine.StartFetch) | _lines(engine.MakeOffer)
    return {name: lines[name] for name in FOR_SPANS}


def _struct(
    heading: str, kind: type[msgspec.Struct], common: dict[str, str] | None = None
) -> Iterator[str]:
    yield from (f"#### {heading}", "", _described(kind), "")
    yield from _fields(kind, common)


def _fields(kind: type[msgspec.Struct], common: dict[str, str] | None = None) -> Iterator[str]:
    """The fields in their order, those that are described elsewhere by their names alone."""
    told, lines = common or {}, _lines(kind)
    for name, line in lines.items():
        if told.get(name) == line or name in FOR_SPANS:
            lines[name] = f"`{name}`"
    yield from _items(lines)
    yield from ([""] if lines else [])


def _items(lines: dict[str, str]) -> list[str]:
    """List items: one for each description, one for neighbours without."""
    items = list[str]()
    for described, group in groupby(lines.values(), lambda line: ": " in line):
        neighbours = list(group)
        items += neighbours if described else ["; ".join(_by_type(neighbours))]
    return [f"- {item}" for item in items]


def _by_type(lines: Iterable[str]) -> Iterator[str]:
    """Join neighbours of one type, which follows the last of them."""
    for of, neighbours in groupby((line.partition(" ") for line in lines), lambda line: line[2]):
        yield f"{', '.join(name for name, _, _ in neighbours)} {of}".rstrip()


def _lines(kind: type[msgspec.Struct]) -> dict[str, str]:
    """By its name, the line of each field: its type, its default, and its string if it has one."""
    described, words = types.type_info(kind), meanings(kind)
    assert isinstance(described, types.StructType)  # noqa: S101  every struct is described as one
    lines = {}
    for field in described.fields:
        of, default = type_name(field.type), "" if field.required else _default(field)
        if default in NOTHING:
            of += "?"
        elif default != "nil" or not of.endswith("or nil"):
            of += f" = {default}" if default else ""
        text = words[field.name]
        lines[field.name] = f"`{field.name}` ({of})" + (f": {text}" if text else "")
    return lines


def _codes() -> Iterator[str]:
    for code, text in code_texts().items():
        when, _, then = text.partition(" Do: ")
        if not then:
            raise Undocumented(f"nothing says when '{code}' comes, and what to do then")
        remedy = "" if then == NO_REMEDY else f" *{then[:1].upper()}{then[1:]}*"
        yield f"- `{code.value}`: {when}{remedy}"


def _described(kind: type) -> str:
    if not text_of(kind):
        raise Undocumented(f"{kind.__name__}: nothing says what it is")
    return text_of(kind)


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
    return {
        "": dict(_names(tree.body)),
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


def type_name(of: types.Type) -> str:
    """A type as a person reads it: by its name, or with its range."""
    text = _type_text(of)
    return next((f"`{name}`" for name, named in NAMED.items() if named == text), text)


def _type_text(of: types.Type) -> str:  # noqa: PLR0911  one return a kind of type
    match of:
        case types.UnionType(options):
            return " or ".join(map(type_name, options))
        case types.StructType(cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case types.EnumType(cls):
            if cls is ErrorCode:
                return "[error code](errors.md)"
            return _one_of([word.value for word in cls])
        case types.LiteralType(values):
            return _one_of(values)
        case types.DictType(key, value):
            most = f"0..{of.max_length} " if of.max_length else ""
            return f"map of {most}{type_name(key)} to {type_name(value)}"
        case types.VarTupleType(item):
            return f"list{_range(of) or ' of'} {type_name(item)}"
        case types.IntType():
            return f"integer {_bounds(of)}".strip()
        case types.FloatType():
            return f"number {_bounds(of)}".strip()
        case types.StrType() if of.pattern:
            return f"tcp://HOST:PORT{_range(of, ' characters')}"
        case types.StrType():
            return f"string{_range(of, ' characters')}"
        case types.BytesType():
            return f"bin{_range(of, ' bytes')}"
    simple = {types.BoolType: "bool", types.NoneType: "nil", types.AnyType: "any"}
    return simple[type(of)]


def _one_of(words: Sequence[Any]) -> str:
    *others, last = (f'"{word}"' for word in words)
    return f"{', '.join(others)} or {last}" if others else last


def _bounds(of: types.IntType | types.FloatType) -> str:
    if of.gt is not None:
        return f"over {of.gt:g}, ..{_power(of.le)}"
    return "" if of.ge is None else f"{_power(of.ge)}..{_power(of.le)}"


def _power(number: float | None) -> str:
    if number is None:
        return ""
    for bits in (31, 53, 62, 63):
        if number in {2**bits, 2**bits - 1, -(2**bits)}:
            return f"{'-' if number < 0 else ''}2^{bits}" + ("-1" if number == 2**bits - 1 else "")
    return f"{number:,}"


def _range(of: types.StrType | types.BytesType | types.VarTupleType, unit: str = "") -> str:
    low, high = of.min_length, of.max_length
    if high is None:
        return ""
    return f" of {low or 0}..{high:,}{unit}"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
