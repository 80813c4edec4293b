"""Writes docs/internals/tables.md from the transition tables: ``python docs/diagrams.py``.

A refusal is not drawn: a handler whose name starts with ``refuse`` or ``ignore``.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from kvbus.table import Transition
from kvbus_decode import read_table as read
from kvbus_decode.fetch import transitions as decode
from kvbus_decode.fetch.entry import FetchState
from kvbus_decode.read_table import LegState
from kvbus_prefill import slots
from kvbus_prefill.offer import transitions as prefill
from kvbus_prefill.offer.entry import OfferState

PAGE = Path(__file__).with_name("internals") / "tables.md"
S = TypeVar("S", bound=StrEnum)
Transitions = Mapping[tuple[S, type[Any]], Transition[S]]
UNDRAWN = ("refuse", "ignore")

HEAD = """\
# State machines

<!-- Written by `python docs/diagrams.py` from the transition tables. Do not edit. -->

An edge is a change of state. `TRANSITIONS` beside each table has the event and the handler of each.
"""


def section(title: str, states: type[S], table: Transitions[S], starts: Mapping[S, str]) -> str:
    """One machine: its diagram, and a sentence for each state."""
    sentences = [f"- **{state}**: {what}" for state, what in state_sentences(states).items()]
    diagram = f"```mermaid\n{state_diagram(table, starts)}\n```"
    return "\n".join([f"\n## {title}\n", diagram, "", *sentences, ""])


def page() -> str:
    """The whole of docs/internals/tables.md."""
    offer = section(
        "An offer, at the prefill agent",
        OfferState,
        prefill.TRANSITIONS,
        {OfferState.AWAITED: "Meet, or MakeOffer"},
    )
    box = section(
        "A box in a staging slot, at the prefill agent",
        slots.SlotState,
        slots.TRANSITIONS,
        {slots.SlotState.WAITING: "Asked"},
    )
    fetch = section(
        "A fetch, at the decode agent",
        FetchState,
        decode.TRANSITIONS,
        {FetchState.MEETING: "Requested, no ticket yet", FetchState.RESOLVING: "Requested"},
    )
    leg = section(
        "A leg of a read, at the decode agent",
        LegState,
        read.TRANSITIONS,
        {LegState.WANTED: "ChunkWanted"},
    )
    return HEAD + offer + box + fetch + leg


def state_diagram(table: Transitions[S], starts: Mapping[S, str]) -> str:
    """The table as a Mermaid ``stateDiagram-v2``; ``starts`` are the first states, with labels."""
    edges = _edges(table)
    lines = [f"    [*] --> {state}: {label}" for state, label in sorted(starts.items())]
    lines += [f"    {source} --> {target}" for source, target in sorted(edges)]
    ends = {target for _, target in edges} - {source for source, _ in edges}
    return "\n".join(["stateDiagram-v2", *lines, *(f"    {end} --> [*]" for end in sorted(ends))])


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
                found[name] = " ".join(sentence.split())
    return {state: found[state.name] for state in states}


def _edges(table: Transitions[S]) -> set[tuple[S, S]]:
    return {
        (source, target)
        for (source, _), transition in table.items()
        for target in transition.to
        if target != source and not transition.handler.__name__.startswith(UNDRAWN)
    }


if __name__ == "__main__":
    PAGE.write_text(page())
