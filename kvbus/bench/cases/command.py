"""The command ``kvbus bench``: a missed target is a figure, a handoff that fails exit status 1."""

import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.table import Table

from kvbus.bench.exits import errors_told
from kvbus.bench.figures import EVERY_TIME, CaseName, Figure, Scale, as_rows, as_table
from kvbus.console import Console
from kvbus.output import write_json


def bench(
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of a raw and a kvbus transfer.")
    ] = Scale().rounds,
    only: Annotated[
        list[CaseName] | None, typer.Option(help="Measure this case only; may be repeated.")
    ] = None,
    as_one_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as the last line of stdout.")
    ] = False,
    scale: Annotated[float, typer.Option(min=1e-4, max=1.0, hidden=True)] = 1.0,
) -> None:
    """Measure handoffs beside bare NIXL on this machine, with agents and engines of its own.

    Between agents that run on two machines: `kvbus bench-prefill | kvbus bench-decode`.
    """
    machine = {
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "scale": scale,
        "rounds": rounds,
        **{package: version(package) for package in ("kvbus", "nixl", "pyzmq")},
    }
    size, show = Scale(rounds, scale), partial(_show, machine, as_one_json=as_one_json)
    with errors_told("bench"):
        _measure(only or EVERY_TIME, size, show)


Show = Callable[[Table, dict[str, Any]], None]


def _show(
    machine: dict[str, Any], table: Table, found: dict[str, Any], *, as_one_json: bool
) -> None:
    if table.row_count:
        Console().print(table)
    if as_one_json:
        write_json({"machine": machine, **found})


def _measure(names: Sequence[CaseName], size: Scale, show: Show) -> None:
    from kvbus.bench.cases.run import run_cases  # noqa: PLC0415 - torch costs seconds, even for --help

    measured: dict[CaseName, Sequence[Figure]] = {}
    try:
        run_cases(names, size, measured)
    finally:  # what failed comes after what was measured
        show(as_table(measured), {"figures": as_rows(measured)})
