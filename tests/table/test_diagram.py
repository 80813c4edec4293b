"""Diagrams are read from the tables, and the page in docs is not older than they are."""

import runpy
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.diagrams import state_diagram, state_sentences

DOCS = Path(__file__).parents[2] / "docs"


class Lamp(StrEnum):
    OFF = "off"
    """It is dark,
    and cold."""

    BROKEN = "broken"
    """It never shines again."""


class Nameless(StrEnum):
    ONLY = "only"


class Pressed: ...


class Dropped: ...


def switch() -> None: ...


def refuse_broken() -> None: ...


def ignore() -> None: ...


def test_a_diagram_shows_each_change_of_state_sorted_and_nothing_else() -> None:
    steps: Any = {
        (Lamp.OFF, Pressed): SimpleNamespace(handler=switch, to=[Lamp.OFF]),
        (Lamp.OFF, Dropped): SimpleNamespace(handler=switch, to=[Lamp.OFF, Lamp.BROKEN]),
        (Lamp.BROKEN, Pressed): SimpleNamespace(handler=refuse_broken, to=[Lamp.OFF]),
        (Lamp.BROKEN, Dropped): SimpleNamespace(handler=ignore, to=[Lamp.OFF]),
    }

    diagram = state_diagram(steps, {Lamp.OFF: "Bought"})

    assert diagram == state_diagram(dict(reversed(steps.items())), {Lamp.OFF: "Bought"})
    assert diagram.splitlines() == [
        "stateDiagram-v2",
        "    [*] --> off: Bought",
        "    off --> broken",
        "    broken --> [*]",
    ]


def test_each_state_is_described_by_the_docstring_under_it_or_it_is_an_error() -> None:
    assert state_sentences(Lamp) == {
        Lamp.OFF: "It is dark, and cold.",
        Lamp.BROKEN: "It never shines again.",
    }
    with pytest.raises(KeyError, match="ONLY"):
        state_sentences(Nameless)


def test_the_page_of_state_machines_is_up_to_date() -> None:
    written = (DOCS / "internals" / "tables.md").read_text()

    generated = runpy.run_path(str(DOCS / "diagrams.py"))["page"]()

    assert written == generated, "docs/internals/tables.md is stale: run python docs/diagrams.py"
