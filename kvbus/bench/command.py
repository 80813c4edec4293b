"""The command ``kvbus bench``: a missed target is a figure, a handoff that fails exit status 1."""

import os
import platform
import sys
from typing import Annotated

import typer
from rich.console import Console

from kvbus.bench.case_names import EVERY_TIME, CaseName
from kvbus.bench.figures import Figure, as_json, print_figures
from kvbus.bench.scale import Scale
from kvbus.errors import KVBusError, leaves


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
    names = only or list(EVERY_TIME)
    machine = {
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "scale": scale,
        "rounds": rounds,
    }
    from kvbus.bench.run import run_bench  # noqa: PLC0415 - torch costs seconds, even for --help

    refused: list[KVBusError] = []
    figures: list[Figure] = []
    try:
        figures = run_bench(names, Scale(rounds, scale))
    except* KVBusError as errors:
        refused = leaves(errors)
    if refused:
        sys.stderr.writelines(f"error: {error}\n" for error in refused)
        raise typer.Exit(1)
    print_figures(figures, Console())
    if as_one_json:
        sys.stdout.write(as_json(figures, machine) + "\n")
