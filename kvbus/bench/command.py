"""The commands ``kvbus bench``, ``bench-prefill`` and ``bench-decode``: output and exit status.

A missed target is a figure, a handoff that fails exit status 1. Figures are shown as they come.
"""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from kvbus.bench.figures import EVERY_TIME, HEADING, MAX_MIB, CaseName, Figure, Scale, lines
from kvbus.console import Console
from kvbus.errors import ConfigError, KVBusError, leaves
from kvbus.output import write_json, write_text
from kvbus.text import printable

if TYPE_CHECKING:
    from kvbus.bench.report import Measured

MAX_ROUNDS = 1000
TABLE_WIDTH = 120
"""Where the terminal has less, it wraps lines itself."""
FAILED, WRONGLY_GIVEN, INTERRUPTED = 1, 2, 130

AsOneJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, as the last line of stdout.")
]
Attach = Annotated[
    Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
]


def bench(
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rounds of a raw and a kvbus transfer.")
    ] = Scale().rounds,
    only: Annotated[
        list[CaseName] | None,
        typer.Option(metavar="CASE", help=f"Measure {', '.join(CaseName)} only; may be repeated."),
    ] = None,
    as_one_json: AsOneJson = False,
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
    left = list(dict.fromkeys(only or EVERY_TIME))
    rows: list[dict[str, Any]] = []

    def show(case: CaseName, figures: Sequence[Figure]) -> None:
        write_text(("" if rows else HEADING) + lines(case, figures))
        rows.extend(figure.row(case) for figure in figures)
        left.remove(case)

    def measure() -> None:
        from kvbus.bench.cases import run_cases  # noqa: PLC0415 - torch costs seconds, even for --help

        run_cases(tuple(left), Scale(rounds, scale), show)

    status, errors = _outcome(measure)
    if as_one_json:
        failed = {"case": left[0], "errors": errors} if errors and left else None
        write_json({"machine": machine, "figures": rows, "failed": failed})
    _end("bench", status, errors)


def bench_prefill(
    attach: Attach,
    mib: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_MIB,
            metavar="N",
            help="MiB of a handoff. Each side takes some three times that, and 300 MiB.",
        ),
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_ROUNDS,
            metavar="N",
            help="Handoffs of each case; ten times as many of one block.",
        ),
    ] = 30,
) -> None:
    """Offer blocks at this machine's prefill agent; print their tickets, for bench-decode.

    Ends with status 0 once all of them have been read.
    """

    def offer() -> None:
        from kvbus.bench.sides import prefill_side  # noqa: PLC0415 - torch costs seconds

        anyio.run(prefill_side, attach, mib, rounds)

    _end("bench-prefill", *_outcome(offer))


def bench_decode(attach: Attach, as_one_json: AsOneJson = False) -> None:
    """Fetch what bench-prefill offers, by the lines on stdin; show speed, cost and what limits.

    Exit status 0: all handoffs were read, and every byte of the first of each case compared.
    """
    from kvbus.bench.report import report  # noqa: PLC0415 - numpy

    measured: list[Measured] = []

    def fetch() -> None:
        from kvbus.bench.sides import decode_side  # noqa: PLC0415 - torch costs seconds

        with Console(stderr=True).status("waiting for kvbus bench-prefill") as status:
            anyio.run(decode_side, attach, measured, status)

    status, errors = _outcome(fetch)
    table, sentences, found = report(measured)
    if table.row_count:
        width = max(Console().width, TABLE_WIDTH)
        Console(width=width).print(table, *sentences, sep="\n")
    if as_one_json:
        write_json({**found, "errors": errors})
    _end("bench-decode", status, errors)


def _outcome(work: Callable[[], None]) -> tuple[int, list[str]]:
    """The exit status that ``work`` deserves, and why, each reason once.

    Several sessions may have ended for one reason.
    """
    status, reasons = 0, list[str]()
    try:
        work()
    except* KVBusError as group:
        errors = leaves(group)
        is_given_wrongly = any(isinstance(one, ConfigError) for one in errors)
        status = WRONGLY_GIVEN if is_given_wrongly else FAILED
        reasons = list(dict.fromkeys(map(str, errors)))
    except* KeyboardInterrupt:
        status, reasons = INTERRUPTED, ["ended by Ctrl-C"]
    return status, reasons


def _end(command: str, status: int, reasons: Sequence[str]) -> None:
    """Each line names the ``command``: of two in a pipe, both write to one terminal."""
    error = "" if status == INTERRUPTED else "error: "
    sys.stderr.writelines(f"{error}{command}: {printable(reason)}\n" for reason in reasons)
    if status:
        raise typer.Exit(status)
