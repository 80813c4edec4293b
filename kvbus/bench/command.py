"""The command ``kvbus bench``: a missed target is a figure, a handoff that fails exit status 1."""

import os
import platform
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from kvbus.bench.figures import EVERY_TIME, CaseName, Figures, Scale, as_rows, as_table
from kvbus.errors import KVBusError, leaves
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
    """Measure handoffs beside bare NIXL on this machine, with agents and engines of its own."""
    machine = {
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "scale": scale,
        "rounds": rounds,
        **{package: version(package) for package in ("kvbus", "nixl", "pyzmq")},
    }
    from kvbus.bench.cases import run_cases  # noqa: PLC0415 - torch costs seconds, even for --help

    refused: list[KVBusError] = []
    measured: Figures = {}
    try:
        measured = run_cases(only or EVERY_TIME, Scale(rounds, scale))
    except* KVBusError as errors:
        refused = leaves(errors)
    if refused:
        sys.stderr.writelines(f"error: {error}\n" for error in refused)
        raise typer.Exit(1)
    Console().print(as_table(measured))
    if as_one_json:
        write_json({"machine": machine, "figures": as_rows(measured)})
