"""Writes docs/state-machines.md from the transition tables: ``python docs/diagrams.py``."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from kvbus.table.diagram import Transitions, state_diagram, state_sentences
from kvbus_decode.fetch import transitions as decode
from kvbus_decode.fetch.entry import FetchState
from kvbus_decode.read import transitions as read
from kvbus_decode.read.leg import LegState
from kvbus_prefill.offer import transitions as prefill
from kvbus_prefill.offer.entry import OfferState
from kvbus_prefill.slots import entry as pack

PAGE = Path(__file__).with_name("state-machines.md")
S = TypeVar("S", bound=StrEnum)

HEAD = """\
# State machines

<!-- Written by `python docs/diagrams.py` from the transition tables. Do not edit. -->

An edge names the events that can lead from one state to another, or that do something without a
change of state. Events that are refused, or that come too late to matter, are not drawn.
"""


def section(title: str, states: type[S], table: Transitions[S], starts: Mapping[S, str]) -> str:
    """One machine: its diagram, and a sentence for each state."""
    sentences = [f"- **{state}**: {what}" for state, what in state_sentences(states).items()]
    diagram = f"```mermaid\n{state_diagram(table, starts)}\n```"
    return "\n".join([f"\n## {title}\n", diagram, "", *sentences, ""])


def page() -> str:
    """The whole of docs/state-machines.md."""
    offer = section(
        "An offer, at the prefill agent",
        OfferState,
        prefill.TRANSITIONS,
        {OfferState.OPEN: "Opened", OfferState.SEALED: "Opened, sealed"},
    )
    box = section(
        "A box in a staging slot, at the prefill agent",
        pack.SlotState,
        pack.TRANSITIONS,
        {pack.SlotState.WAITING: "Asked"},
    )
    fetch = section(
        "A fetch, at the decode agent",
        FetchState,
        decode.TRANSITIONS,
        {FetchState.RESOLVING: "Requested"},
    )
    leg = section(
        "A leg of a read, at the decode agent",
        LegState,
        read.TRANSITIONS,
        {LegState.WANTED: "ChunkWanted"},
    )
    return HEAD + offer + box + fetch + leg


if __name__ == "__main__":
    PAGE.write_text(page())
