"""Writes the lists of the protocol pages and ``errors.md``: ``python docs/generate_protocol.py``.

All is said where a message is declared: types, ranges and defaults by its fields, what they mean by
the strings below them. Refuses a field, a type or an error code without such a string.
"""

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
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
    ErrorBody,
    Request,
    Role,
    Socket,
)
from kvbus.protocol.ticket import Rendezvous, Ticket

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
    "agent types": (
        geometry.Tile,
        peer.EngineMemory,
        peer.HeldOffer,
        attach.MemorySocket,
        attach.LentSegment,
        attach.LentCuda,
        attach.LentCuda,
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
SECTIONS: dict[str, tuple[Socket, ...]] = {
    "attach": (Socket.ATTACH,),
    "engine": (Socket.ENGINE,),
    "prefill": (Socket.PREFILL,),
    "decode": (Socket.DECODE,),
    "peer": (Socket.PREFILL_PEER, Socket.DECODE_PEER),
    "memory": (Socket.MEMORY,),
}
TOOLS = frozenset((Role.ROUTER, Role.OBSERVER))
"""Who may ask what the page for tools has."""
FOR_SPANS = ("traceparent", "sent_s", "wanted_s")
"""Fields that say nothing but what goes into spans: one paragraph is about all of them."""
IN_COMMON = 2
"""Fields that so many messages of one page have alike are told once."""
Kinds = list[type[msgspec.Struct]]
OF_OFFER = tuple(map(ErrorCode, peer.OF_OFFER.split()))
"""Codes of what is about an offer, which are listed once."""
NAMED = {
    "name": "string of 1 to 256 characters",
    "text": "string of 0 to 4,096 characters",
    "secret": "string of 16 to 128 characters",
    "endpoint": "tcp://HOST:PORT, of 0 to 256 characters",
    "index": "integer from 0 to 2^31 - 1",
    "size": "integer from 1 to 2^31 - 1",
    "count": "integer from 0 to 2^63 - 1",
    "serial": "integer from 1 to 2^63 - 1",
    "bytes": "integer from 1 to 2^62",
    "seconds": "number over 0 to 86,400",
    "tables": "map of `name` to [BlockTable](#blocktable), at most 64",
    "priority": "integer from -2147483648 to 2^31 - 1",
    "plain": "string or integer or number",
}
"""What types of fields are called on the pages."""
NOTHING = ('""', "[]", "{}", "0", "0.0", "false", "all 0")
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
    pages: dict[str, tuple[tuple[str, ...], Kinds]] = {
        "engines": (
            ("attach", "engine", "prefill", "decode"),
            [*NOTICES.values(), *SHARED["memory types"], Ticket],
        ),
        "agents": (("peer", "memory"), [*SHARED["agent types"]]),
        "tools": (("tools",), [*events, *SHARED["tool types"], Rendezvous]),
    }
    everywhere: dict[str, str] = {}
    common: dict[str, dict[str, str]] = {}
    for page, (names, others) in pages.items():
        kinds = [kind for name in names for kind in asked[name]]
        here = _common([*kinds, *(kind.reply for kind in kinds), *others])
        common[page] = everywhere | here
        everywhere = everywhere or here
        told = [line for name, line in here.items() if page == "engines" or name not in everywhere]
        if page == "agents":
            told += ["", f"Refusals of an offer: {', '.join(f'`{one}`' for one in OF_OFFER)}."]
        yield f"common of {page}", told
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
    yield "ticket", list(_fields(Ticket, common["engines"]))
    yield "rendezvous", list(_fields(Rendezvous, tools))
    yield "error", list(_fields(ErrorBody))
    yield "codes", list(_codes())
    yield "named", [f"- `{name}`: {what}" for name, what in NAMED.items()]
    yield "spans", _for_spans()


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
    codes = [f"`{one}`" for one in kind.refusals if one is not ErrorCode.NOT_REGISTERED]
    if set(OF_OFFER) <= set(kind.refusals):
        rest = [f"`{one}`" for one in kind.refusals if one not in OF_OFFER]
        codes = ["those [of an offer](#fields-of-several-messages)", *rest]
    if codes:
        yield f"Refusals: {', '.join(codes)}."
    if kind.allowed_roles & TOOLS:
        roles = [f"`{role}`" for role in Role if role in kind.allowed_roles]
        yield f"Keys that may ask it: {', '.join(roles)}."
    yield ""


def _first_with(reply: type[Any]) -> type[Request[Any]]:
    """The request whose reply is listed; others with the same lead there."""
    kinds = (kind for kinds in REQUESTS.values() for kind in kinds.values())
    return next(kind for kind in kinds if kind.reply is reply)


def _common(kinds: Kinds) -> dict[str, str]:
    """By its name, the line of each field that many of these have alike, but those for spans."""
    lines = Counter(line for kind in dict.fromkeys(kinds) for line in _lines(kind).items())
    often = {name: line for (name, line), num in lines.items() if num >= IN_COMMON}
    return {name: line for name, line in often.items() if name not in FOR_SPANS}


def _for_spans() -> list[str]:
    """The line of each field for spans, as the first message with it has it."""
    lines = _lines(engine.StartFetch) | _lines(engine.MakeOffer)
    return [lines[name] for name in FOR_SPANS]


def _struct(
    heading: str, kind: type[msgspec.Struct], common: dict[str, str] | None = None
) -> Iterator[str]:
    yield from (f"#### {heading}", "", text_of(kind), "")
    yield from _fields(kind, common)


def _fields(kind: type[msgspec.Struct], common: dict[str, str] | None = None) -> Iterator[str]:
    """The fields in their order, those that are told elsewhere by their names alone."""
    told = dict(common or {})

    def is_known(field: tuple[str, str]) -> bool:
        name, line = field
        return told.get(name) == line or (name in FOR_SPANS and kind is not Ticket)

    lines = _lines(kind)
    for known, fields in groupby(lines.items(), is_known):
        if known:
            yield "- " + ", ".join(f"`{name}`" for name, _ in fields)
        else:
            yield from (line for _, line in fields)
    yield from ([""] if lines else [])


def _lines(kind: type[msgspec.Struct]) -> dict[str, str]:
    """By its name, the line of each field: its type, its default, what it means."""
    described, words = types.type_info(kind), meanings(kind)
    assert isinstance(described, types.StructType)  # noqa: S101  every struct is described as one
    if missing := [field.name for field in described.fields if not words[field.name]]:
        raise Undocumented(f"{kind.__name__}: nothing says what {', '.join(missing)} means")
    lines = {}
    for field in described.fields:
        of, default = type_name(field.type), "" if field.required else _default(field)
        if default in NOTHING:
            of += "?"
        elif default != "nil" or not of.endswith("or nil"):
            of += f" = {default}" if default else ""
        lines[field.name] = f"- `{field.name}` ({of}): {words[field.name]}"
    return lines


def _codes() -> Iterator[str]:
    for code, text in code_texts().items():
        when, _, then = text.partition(" Do: ")
        if not then:
            raise Undocumented(f"nothing says when '{code}' comes, and what to do then")
        remedy = "" if then == NO_REMEDY else f" *{then[:1].upper()}{then[1:]}*"
        yield f"- `{code.value}`: {when}{remedy}"


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
                return "an [error code](errors.md)"
            return "one of " + ", ".join(f'"{word.value}"' for word in cls)
        case types.LiteralType(values):
            return "one of " + ", ".join(f'"{value}"' for value in values)
        case types.DictType(key, value):
            most = f", at most {of.max_length}" if of.max_length else ""
            return f"map of {type_name(key)} to {type_name(value)}{most}"
        case types.VarTupleType(item):
            return f"list of {_range(of, 'items')}{type_name(item)}"
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
    simple = {types.BoolType: "bool", types.NoneType: "nil", types.AnyType: "any"}
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
        return ""
    if what == "items":
        return f"{low} to {high:,} of " if low else f"at most {high:,} of "
    return f"of {high:,} {what}" if low == high else f"of {low or 0} to {high:,} {what}"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
