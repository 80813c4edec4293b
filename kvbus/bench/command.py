"""The command ``kvbus bench``: a missed target is a figure, a handoff that fails exit status 1."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Show where one handoff's time goes, hop by hop, and measure no case."
        ),
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
    if trace and only:
        raise typer.BadParameter("--trace has handoffs of its own: leave out --only")
    size = Scale(rounds, scale)
    table, found = _trace(size) if trace else _measure(only or EVERY_TIME, size)
    Console().print(table)
    if as_one_json:
        write_json({"machine": machine, **found})


def _measure(names: Sequence[CaseName], size: Scale) -> tuple[Table, dict[str, Any]]:
    from kvbus.bench.cases import run_cases  # noqa: PLC0415 - torch costs seconds, even for --help

    measured: Figures = {}
    with _refusals_told():
        measured = run_cases(names, size)
    return as_table(measured), {"figures": as_rows(measured)}


def _trace(size: Scale) -> tuple[Table, dict[str, Any]]:
    from kvbus.bench.trace.hops import trace_rows, trace_table  # noqa: PLC0415 - as above
    from kvbus.bench.trace.measure import trace_handoffs  # noqa: PLC0415

    hops = []
    with _refusals_told():
        hops = trace_handoffs(size)
    return trace_table(hops), {"trace": trace_rows(hops)}


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Exit status 1 when a handoff fails, and each reason on stderr."""
    refused: list[KVBusError] = []
    try:
        yield
    except* KVBusError as errors:
        refused = leaves(errors)
    if refused:
        sys.stderr.writelines(f"error: {error}\n" for error in refused)
        raise typer.Exit(1)
