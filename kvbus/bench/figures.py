"""What a measurement says: a value with a unit and its target, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

VERDICTS = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that is met by values at it or on its good side."""

    limit: float
    at_least: bool = False

    def met_by(self, value: float) -> bool:
        """Whether ``value`` is good enough."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One value of one case; most have no target."""

    case: str
    name: str
    value: float
    unit: str
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.target.met_by(self.value)


def as_json(figures: Sequence[Figure], machine: dict[str, Any]) -> str:
    """All of it as one line of JSON."""
    rows = [
        {
            "case": figure.case,
            "name": figure.name,
            "value": float(f"{figure.value:.6g}"),
            "unit": figure.unit,
            "target": None if figure.target is None else str(figure.target),
            "met": figure.met,
        }
        for figure in figures
    ]
    versions = {package: version(package) for package in ("kvbus", "nixl", "pyzmq")}
    return msgspec.json.encode({"machine": machine | versions, "figures": rows}).decode()


def print_figures(figures: Sequence[Figure], console: Console) -> None:
    """Print one section for each case."""
    table = Table(box=None, pad_edge=False)
    table.add_column("case")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for heading in ("unit", "target", ""):
        table.add_column(heading)
    case = ""
    for figure in figures:
        if case and figure.case != case:
            table.add_section()
        target = "" if figure.target is None else str(figure.target)
        table.add_row(
            figure.case if figure.case != case else "",
            figure.name,
            f"{figure.value:,.3f}" if figure.value < 100 else f"{figure.value:,.0f}",
            figure.unit,
            target,
            VERDICTS[figure.met],
        )
        case = figure.case
    console.print(table)
