"""Diagrams are read from the tables, and the page in docs is not older than they are."""

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from docs.diagrams import state_diagram, state_sentences

DOCS = Path(__file__).parents[2] / "docs"


class Lamp(StrEnum):
    """A machine to draw."""

    OFF = "off"
    """It is dark,
    and cold."""

    ON = "on"
    """It shines."""

    BROKEN = "broken"
    """It never shines again."""


class Nameless(StrEnum):
    """A machine of which nobody says what its state means."""

    ONLY = "only"


class Pressed: ...


class Dropped: ...


class Moved: ...


@dataclass(frozen=True)
class Step:
    handler: Callable[..., Any]
    to: tuple[Lamp, ...]


def switch() -> None: ...


def refuse_broken() -> None: ...


def ignore() -> None: ...


LAMP: Any = {
    (Lamp.ON, Pressed): Step(switch, (Lamp.OFF,)),
    (Lamp.ON, Moved): Step(switch, (Lamp.ON,)),
    (Lamp.ON, Dropped): Step(switch, (Lamp.BROKEN,)),
    (Lamp.OFF, Pressed): Step(switch, (Lamp.ON,)),
    (Lamp.OFF, Dropped): Step(switch, (Lamp.BROKEN, Lamp.OFF)),
    (Lamp.OFF, Moved): Step(ignore, (Lamp.OFF,)),
    (Lamp.BROKEN, Pressed): Step(refuse_broken, (Lamp.BROKEN,)),
    (Lamp.BROKEN, Moved): Step(ignore, (Lamp.BROKEN,)),
    (Lamp.BROKEN, Dropped): Step(ignore, (Lamp.BROKEN,)),
}


def test_a_diagram_shows_what_does_something_sorted_and_nothing_else() -> None:
    diagram = state_diagram(LAMP, {Lamp.OFF: "Bought"})

    assert diagram.splitlines() == [
        "stateDiagram-v2",
        "    [*] --> off: Bought",
        "    off --> broken: Dropped",
        "    off --> off: Dropped",
        "    off --> on: Pressed",
        "    on --> broken: Dropped",
        "    on --> off: Pressed",
        "    on --> on: Moved",
        "    broken --> [*]",
    ]


def test_a_diagram_does_not_depend_on_the_order_of_the_table() -> None:
    backwards = dict(reversed(LAMP.items()))

    diagram = state_diagram(backwards, {Lamp.OFF: "Bought"})

    assert diagram == state_diagram(LAMP, {Lamp.OFF: "Bought"})


def test_each_state_is_described_by_the_docstring_under_it() -> None:
    sentences = state_sentences(Lamp)

    assert sentences == {
        Lamp.OFF: "It is dark, and cold.",
        Lamp.ON: "It shines.",
        Lamp.BROKEN: "It never shines again.",
    }


def test_a_state_without_a_docstring_is_an_error() -> None:
    with pytest.raises(KeyError, match="ONLY"):
        state_sentences(Nameless)


def test_the_page_of_state_machines_is_up_to_date() -> None:
    written = (DOCS / "state-machines.md").read_text()

    generated = runpy.run_path(str(DOCS / "diagrams.py"))["page"]()

    assert written == generated, "docs/state-machines.md is stale: run python docs/diagrams.py"
