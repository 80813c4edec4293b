"""The page of state machines is read from the tables, and is not older than they are."""

import runpy
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.generate_tables import state_lines, state_sentences

DOCS = Path(__file__).parents[3] / "docs"


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


def test_state_lists_next_states_in_order_without_refusals() -> None:
    steps: Any = {
        (Lamp.OFF, Pressed): SimpleNamespace(handler=switch, to=[Lamp.OFF]),
        (Lamp.OFF, Dropped): SimpleNamespace(handler=switch, to=[Lamp.OFF, Lamp.BROKEN]),
        (Lamp.BROKEN, Pressed): SimpleNamespace(handler=refuse_broken, to=[Lamp.OFF]),
        (Lamp.BROKEN, Dropped): SimpleNamespace(handler=ignore, to=[Lamp.OFF]),
    }

    lines = state_lines(steps, state_sentences(Lamp), {Lamp.OFF: "Bought"})

    assert lines == [
        "- **off** (first: Bought) → broken: It is dark, and cold.",
        "- **broken**: It never shines again.",
    ]


def test_each_state_has_docstring_or_page_raises_error() -> None:
    assert state_sentences(Lamp) == {
        Lamp.OFF: "It is dark, and cold.",
        Lamp.BROKEN: "It never shines again.",
    }
    with pytest.raises(KeyError, match="ONLY"):
        state_sentences(Nameless)


def test_the_page_of_state_machines_is_up_to_date() -> None:
    written = (DOCS / "internals" / "tables.md").read_text()

    generated = runpy.run_path(str(DOCS / "generate_tables.py"))["page"]()

    assert written == generated, "stale: run python docs/generate_tables.py"
