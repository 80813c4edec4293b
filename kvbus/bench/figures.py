"""What is measured and how much of it, and what comes of it: figures as a table and as JSON.

The command line needs all of this; to import a case would cost it seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.table import Table
from rich.text import Text

VERDICTS = {True: Text("ok", "green"), False: Text("missed", "red"), None: Text()}


class CaseName(StrEnum):
    """The cases, in the order in which they are measured."""

    CONTIGUOUS_64M = "contiguous-64m"
    CONTIGUOUS_256M = "contiguous-256m"
    SCATTERED_256K = "scattered-256k"
    SCATTERED_16K = "scattered-16k"
    FIXED = "fixed"
    LOAD = "load"
    PRIORITY = "priority"
    IDLE = "idle"
    RATE = "rate"
    TP_1_TO_2 = "tp-1-to-2"
    TP_2_TO_1 = "tp-2-to-1"
    HND_TO_NHD = "hnd-to-nhd"
    BLOCK_64_TO_16 = "block-64-to-16"
    MLA = "mla-2-to-1"
    CHUNKED = "chunked"
    HOST = "host"
    MEMORY = "memory"
    LARGE = "large"


ONLY_WHEN_ASKED = {CaseName.MEMORY, CaseName.LARGE}
"""They take long, or 9 GiB: they run when ``--only`` names them."""
EVERY_TIME = tuple(name for name in CaseName if name not in ONLY_WHEN_ASKED)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: pairs of a raw and a kvbus transfer, and a factor for all sizes.

    ``factor`` 1 is the real thing; a test has less.
    """

    rounds: int = 30
    factor: float = 1.0

    def count(self, full: int, *, at_least: int = 2) -> int:
        """A number of things, scaled."""
        return max(at_least, round(full * self.factor))

    def seconds(self, full: float) -> float:
        """A duration, scaled."""
        return max(0.2, full * self.factor)


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
    """One value of a case; most have no target."""

    name: str
    value: float
    unit: str = ""
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.target.met_by(self.value)


Figures = Mapping[CaseName, Sequence[Figure]]


def milliseconds(name: str, seconds: float, target: Target | None = None) -> Figure:
    """A time."""
    return Figure(name, seconds * 1e3, "ms", target)


def speed(name: str, num_bytes: int, seconds: float) -> Figure:
    """Bytes a second."""
    return Figure(name, num_bytes / seconds / 1e9, "GB/s")


def as_rows(measured: Figures) -> list[dict[str, Any]]:
    """All of it, for JSON."""
    return [
        {
            "case": case,
            "name": figure.name,
            "value": float(f"{figure.value:.6g}"),
            "unit": figure.unit,
            "target": None if figure.target is None else str(figure.target),
            "met": figure.met,
        }
        for case, figures in measured.items()
        for figure in figures
    ]


def as_table(measured: Figures) -> Table:
    """All of it, for people: one section for each case."""
    table = Table("case", "figure", box=None, pad_edge=False)
    table.add_column("value", justify="right")
    for heading in ("unit", "target", ""):
        table.add_column(heading)
    for case, figures in measured.items():
        for number, figure in enumerate(figures):
            table.add_row(
                "" if number else case,
                figure.name,
                f"{figure.value:,.3f}" if figure.value < 100 else f"{figure.value:,.0f}",
                figure.unit,
                "" if figure.target is None else str(figure.target),
                VERDICTS[figure.met],
                end_section=number == len(figures) - 1,
            )
    return table
