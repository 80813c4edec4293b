"""What was measured between two agents, as a table, two sentences, and JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from kvbus.bench.sides.limits import Measured, PathTimes
from kvbus.text import bytes_text, rate_text, time_text


def report(measured: Sequence[Measured]) -> tuple[Table, list[str], dict[str, Any]]:
    """The table of all cases, sentences below it, and both for JSON."""
    times = [one for case in measured for one in case.by_path()]
    limits = [one.limit(_best(times, one.path)) for one in times]
    rows = [_row(one, limit) for one, limit in zip(times, limits, strict=True)]
    first_ms = _milliseconds(measured[0].first.seconds) if measured else None
    return (
        _table(times, limits),
        list(_sentences(measured, times)),
        {
            "first_ms": first_ms,
            "figures": rows,
        },
    )


def _best(times: Sequence[PathTimes], path: str) -> float:
    """Bytes a second of the reading that was fastest on this path."""
    return max(one.read_bytes_per_s for one in times if one.path == path)


def _table(times: Sequence[PathTimes], limits: Sequence[str]) -> Table:
    table = Table("case", "block", "runs of", "path", box=None, pad_edge=False)
    for heading in ("times", "bytes", "GB/s", "ms p50", "p99"):
        table.add_column(heading, justify="right")
    table.add_column("what limits")
    for one, limit in zip(times, limits, strict=True):
        table.add_row(
            one.case.name,
            bytes_text(one.case.source.block_bytes),
            bytes_text(one.run_bytes),
            one.path,
            str(len(one.fetches)),
            bytes_text(one.num_bytes),
            _three_digits(one.bytes_per_s / 1e9),
            _three_digits(one.quantile_s(0.5) * 1e3),
            _three_digits(one.quantile_s(0.99) * 1e3),
            limit,
        )
    return table


def _sentences(measured: Sequence[Measured], times: Sequence[PathTimes]) -> Iterator[str]:
    small = [one for one in times if one.case.is_one]
    large = [one for one in times if not one.case.is_one]
    if small:
        fixed, first = max(small, key=lambda one: len(one.fetches)), measured[0].first
        yield (
            f"A handoff of one block takes {time_text(fixed.quantile_s(0.5))}, the first one of two"
            f" engines {time_text(first.seconds)}."
        )
    if large:
        best = max(large, key=lambda one: one.bytes_per_s)
        yield f"Most is {rate_text(best.bytes_per_s)}, {best.case.name} by {best.path}."


def _row(one: PathTimes, limit: str) -> dict[str, Any]:
    return {
        "case": one.case.name,
        "path": one.path,
        "block_bytes": one.case.source.block_bytes,
        "run_bytes": one.run_bytes,
        "num_bytes": one.num_bytes,
        "handoffs": len(one.fetches),
        "bytes_per_s": float(f"{one.bytes_per_s:.6g}"),
        "p50_ms": _milliseconds(one.quantile_s(0.5)),
        "p99_ms": _milliseconds(one.quantile_s(0.99)),
        "parts_ms": {part: _milliseconds(seconds) for part, seconds in one.parts_s.items()},
        "limit": limit,
    }


def _three_digits(value: float) -> str:
    """Or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(seconds: float) -> float:
    return float(f"{seconds * 1e3:.6g}")
