"""Bytes, times, rates and lists of numbers as text for people, and text that is safe to print."""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(num_bytes: float) -> str:
    """``512 B``, ``64 KiB``, ``1.5 MiB``."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {UNITS[unit]}"


def rate_text(bytes_per_s: float) -> str:
    """``9.31 GB/s``, ``850 MB/s``, ``12 kB/s``."""
    for size, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def time_text(seconds: float) -> str:
    """Three digits or more, as ``13.7 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if (value := seconds * factor) >= 1:
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def numbers_text(numbers: Iterable[int]) -> str:
    """``0-3, 7``: runs of two or more as intervals; one step for all as ``0-30 by 2``."""
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
    r"""The text with an escape such as ``\u001b`` for what is not printable, but for newlines.

    Names come from others: a terminal obeys control characters, and shows what follows some others
    in another order. In JSON the escape stands for the character itself.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one == "\n" or one.isprintable() else json.dumps(one)[1:-1] for one in text
    )


def ascii_text(text: str) -> str:
    """The text with escapes as of JSON for all that is not ASCII; JSON stays what it is."""
    return "".join(one if one.isascii() else json.dumps(one)[1:-1] for one in text)


def printable_values(_logger: object, _method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """A processor of structlog, ahead of a renderer that adds control characters of its own.

    What is no text is rendered by `repr`, which escapes alike.
    """
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in event.items()
    }
