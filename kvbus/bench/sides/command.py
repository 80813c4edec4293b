"""The commands ``kvbus bench-prefill`` and ``kvbus bench-decode``: output and exit status."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from kvbus.bench.exits import errors_told
from kvbus.bench.sides.handed import MAX_MIB
from kvbus.console import Console
from kvbus.output import write_json

if TYPE_CHECKING:
    from kvbus.bench.sides.limits import Measured

MAX_ROUNDS = 1000
TABLE_WIDTH = 120
"""Where the terminal has less, it wraps lines itself."""
WAITING = "waiting for kvbus bench-prefill"

Attach = Annotated[
    Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
]


def bench_prefill(
    attach: Attach,
    mib: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_MIB,
            help="MiB of a handoff. Each side takes some three times that, and 300 MiB.",
        ),
    ] = 64,
    rounds: Annotated[
        int, typer.Option(min=1, max=MAX_ROUNDS, help="Handoffs of each case; ten of one block.")
    ] = 30,
) -> None:
    """Offer blocks at this machine's prefill agent; print their tickets, for bench-decode.

    Ends with status 0 once all of them have been read.
    """
    with errors_told("bench-prefill"):
        from kvbus.bench.sides.prefill import prefill_side  # noqa: PLC0415 - torch costs seconds

        anyio.run(lambda: prefill_side(attach, num_mib=mib, rounds=rounds))


def bench_decode(
    attach: Attach,
    as_one_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as the last line of stdout.")
    ] = False,
) -> None:
    """Fetch what bench-prefill offers, by the lines on stdin; show speed, cost and what limits.

    Exit status 0: all handoffs were read, and every byte of the first of each case compared.
    """
    with errors_told("bench-decode"):
        from kvbus.bench.sides.decode import decode_side  # noqa: PLC0415 - torch costs seconds
        from kvbus.bench.sides.report import report  # noqa: PLC0415

        measured: list[Measured] = []
        try:
            with Console(stderr=True).status(WAITING) as status:
                anyio.run(decode_side, attach, measured, status)
        finally:  # what failed comes after what was measured
            table, sentences, found = report(measured)
            if table.row_count:
                width = max(Console().width, TABLE_WIDTH)
                Console(width=width).print(table, *sentences, sep="\n")
            if as_one_json:
                write_json(found)
