"""What a measurement says: a value with a unit, and the target that it is held against.

Refuses to measure or to print.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec


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
