"""Text for people: numbers with units, and untrusted text that is safe to print."""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(num_bytes: float) -> str:
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {UNITS[unit]}"


def rate_text(bytes_per_s: float) -> str:
    for size, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def time_text(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if (value := seconds * factor) >= 1:
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def numbers_text(numbers: Iterable[int]) -> str:
    """Format as ``0-3, 7``, or with a constant step as ``0-30 by 2``."""
    ordered = sorted(numbers)
    steps = {b - a for a, b in pairwise(ordered)}
    if len(ordered) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"{ordered[0]}-{ordered[-1]} by {step}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def printable(text: str) -> str:
    r"""Escape unprintable characters except newlines, as ``\u001b``.

    Control characters act on a terminal, and others reorder its text.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one == "\n" or one.isprintable() else json.dumps(one)[1:-1] for one in text
    )


def ascii_text(text: str) -> str:
    """Escape non-ASCII characters as in JSON; JSON keeps its meaning."""
    return "".join(one if one.isascii() else json.dumps(one)[1:-1] for one in text)


def printable_values(_logger: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Make a structlog event safe, before a renderer adds control characters."""
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in event.items()
    }
