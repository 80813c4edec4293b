"""Writes docs/internals/tables.md from the transition tables: ``python docs/generate_tables.py``.

A refusal is not a change of state: a handler whose name starts with ``refuse`` or ``ignore``.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from kvbus.protocol.engine import MakeOffer
from kvbus.protocol.peer import AwaitOffer
from kvbus.table.table import Transition
from kvbus_decode import read_table as read
from kvbus_decode.fetch import transitions as decode
from kvbus_decode.fetch.entry import FetchState
from kvbus_decode.fetch.events import Requested
from kvbus_decode.read_table import TransferState
from kvbus_prefill import slot_table as slots
from kvbus_prefill.offer import transitions as prefill
from kvbus_prefill.offer.entry import OfferState

PAGE = Path(__file__).with_name("internals") / "tables.md"
S = TypeVar("S", bound=StrEnum)
Transitions = Mapping[tuple[S, type[Any]], Transition[S]]
NO_CHANGE = ("refuse", "ignore")
FETCH_STARTS = (
    FetchState.AWAITING,
    FetchState.RESOLVING,
    FetchState.QUEUED,
    FetchState.COMMITTING,
)

HEAD = """\
# State machines

<!-- Written by `python docs/generate_tables.py` from the transition tables. Do not edit. -->

This page lists the states of each table, with the states that can follow each behind the arrow.
`TRANSITIONS` beside each table has the events and handlers.
"""


Starts = Mapping[S, tuple[type[Any], ...]]
"""Events that make an entry, by its first state."""


def section(title: str, states: type[S], table: Transitions[S], starts: Starts[S]) -> str:
    lines = state_lines(table, state_sentences(states), starts)
    return "\n".join([f"\n## {title}\n", *lines, ""])


def page() -> str:
    """The whole of docs/internals/tables.md."""
    offer = section(
        "An offer, at the prefill agent",
        OfferState,
        prefill.TRANSITIONS,
        {OfferState.AWAITED: (AwaitOffer, MakeOffer)},
    )
    tile = section(
        "A tile in a staging slot, at the prefill agent",
        slots.SlotState,
        slots.TRANSITIONS,
        {slots.SlotState.WAITING: (slots.SlotWanted,)},
    )
    fetch = section(
        "A fetch, at the decode agent",
        FetchState,
        decode.TRANSITIONS,
        dict.fromkeys(FETCH_STARTS, (Requested,)),
    )
    transfer = section(
        "A transfer of a read, at the decode agent",
        TransferState,
        read.TRANSITIONS,
        {TransferState.WANTED: (read.ChunkWanted,)},
    )
    return HEAD + offer + tile + fetch + transfer


def state_lines(table: Transitions[S], sentences: Mapping[S, str], starts: Starts[S]) -> list[str]:
    edges = _edges(table)
    lines = []
    for state, meaning in sentences.items():
        events = " or ".join(f"`{one.__name__}`" for one in starts.get(state, ()))
        begins = f" (made by {events})" if events else ""
        following = [str(target) for target in sentences if (state, target) in edges]
        after = f" → {', '.join(following)}" if following else ""
        lines.append(f"- **{state}**{begins}{after}: {meaning}")
    return lines


def state_sentences(states: type[S]) -> dict[S, str]:
    """The docstring under each member of ``states``; raises `KeyError` when one has none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(states))).body
    if not isinstance(definition, ast.ClassDef):
        raise TypeError(f"{states} is not defined by a class statement")
    found = {}
    for member, below in zip(definition.body, definition.body[1:], strict=False):
        match member, below:
            case (
                ast.Assign(targets=[ast.Name(name)]),
                ast.Expr(ast.Constant(str(sentence))),
            ):
                found[name] = " ".join(sentence.split()).replace("``", "`")
    return {state: found[state.name] for state in states}


def _edges(table: Transitions[S]) -> set[tuple[S, S]]:
    return {
        (source, target)
        for (source, _), transition in table.items()
        for target in transition.to
        if target != source and not transition.handler.__name__.startswith(NO_CHANGE)
    }


if __name__ == "__main__":
    PAGE.write_text(page())
