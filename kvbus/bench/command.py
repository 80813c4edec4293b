"""Commands ``kvbus bench``, ``bench-prefill`` and ``bench-decode``."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from kvbus.bench.figures import CASES, EVERY_TIME, GPU_CASES, MAX_MIB, Scale
from kvbus.bench.machine import facts, head
from kvbus.bench.plot import check_plot, draw, panels
from kvbus.bench.sheet import Sheet
from kvbus.errors import ConfigError, KVBusError, SegmentError, leaves
from kvbus.memory.cuda import check_ordinal, driver_version, seen_gpus
from kvbus.options import completed_by
from kvbus.output import write_json, write_text
from kvbus.progress import Progress
from kvbus.spec_text import gpu_number
from kvbus.text import printable

MAX_ROUNDS = 1000

AsOneJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, as the last line of stdout.")
]
Attach = Annotated[
    Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
]


def bench(
    *,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rounds of a raw and a kvbus transfer.")
    ] = Scale().rounds,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE",
            help=f"Measure {', '.join(CASES)} only; may be repeated.",
            autocompletion=completed_by((*CASES, *GPU_CASES)),
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU",
            help="Measure handoffs between engines on this GPU, such as cuda:0; given twice, "
            f"between two. Cases: {', '.join(GPU_CASES)}.",
        ),
    ] = None,
    as_one_json: AsOneJson = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the figures as bars: FILE.svg or FILE.png."),
    ] = None,
    scale: Annotated[float, typer.Option(min=1e-4, max=1.0, hidden=True)] = 1.0,
) -> None:
    """Measure handoffs beside bare NIXL on this machine, with agents and engines of its own.

    To measure between agents on two machines: `kvbus bench-prefill | kvbus bench-decode`.
    """
    gpus = [_gpu(text) for text in device or ()]
    every, known = (GPU_CASES, GPU_CASES) if gpus else (EVERY_TIME, CASES)
    names = tuple(dict.fromkeys(only or every))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--only: no case {', '.join(unknown)}; there are {', '.join(known)}")
    if len(gpus) > 2:
        raise ConfigError("--device: one GPU for both engines, or one for each")
    if plot is not None:
        check_plot(plot)

    def measure(sheet: Sheet) -> None:
        # torch costs seconds, even for --help
        from kvbus.bench import cases, gpu_cases, run  # noqa: PLC0415

        found = gpu_cases.GPU_CASES if gpus else cases.CASES
        devices = (gpus[0], gpus[-1]) if gpus else ("cpu", "cpu")
        run.run_cases(found, names, Scale(rounds, scale), sheet, devices)
        if plot is not None:
            draw(panels(sheet.rows), plot, caption=sheet.head)

    about = {"driver": driver_version(), "gpus": [*map(_model, gpus)]} if gpus else {}
    progress = Progress(len(names), in_background=False)
    _show("bench", measure, progress, as_one_json, scale=scale, rounds=rounds, **about)


def _gpu(text: str) -> str:
    ordinal = gpu_number(text)
    if ordinal is None:
        raise ConfigError("--device is a GPU: without it, the engines are on the CPU")
    try:
        check_ordinal(ordinal)
    except SegmentError as error:
        raise ConfigError(f"--device {text}: {error.message}") from error
    return f"cuda:{ordinal}"


def _model(device: str) -> str:
    return seen_gpus()[gpu_number(device) or 0].model


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

    Exit status 0: all blocks were read.
    """

    def offer() -> None:
        from kvbus.bench.sides import prefill_side  # noqa: PLC0415 - torch costs seconds

        anyio.run(prefill_side, attach, mib, rounds)

    _run("bench-prefill", offer)


def bench_decode(attach: Attach, as_one_json: AsOneJson = False) -> None:
    """Fetch what bench-prefill offers, by the lines on stdin; compare bytes, and show speeds.

    Exit status 0: all handoffs were read, and every byte of the first of each case is equal. The
    last line of the figures is `ok` then.
    """

    def fetch(sheet: Sheet) -> None:
        from kvbus.bench.sides import decode_side  # noqa: PLC0415 - torch costs seconds

        num_read = anyio.run(decode_side, attach, sheet)
        write_text(f"ok: {num_read} handoffs; all bytes of the first of each case are equal\n")

    _show("bench-decode", fetch, Progress(0, "handoffs", in_background=False), as_one_json)


def _show(
    command: str,
    measure: Callable[[Sheet], None],
    progress: Progress,
    as_one_json: bool,
    **options: Any,
) -> None:
    machine = {**facts(), **options}
    sheet = Sheet(progress, head(machine))

    def work() -> None:
        write_text(f"{sheet.head}\n\n")
        with progress:
            measure(sheet)

    def report(errors: list[str]) -> None:
        failed = {"case": sheet.case, "errors": errors} if errors else None
        if as_one_json:
            write_json({"machine": machine, "figures": sheet.rows, "failed": failed})

    _run(command, work, report)


def _run(
    command: str, work: Callable[[], None], report: Callable[[list[str]], None] = lambda _: None
) -> None:
    status, reasons, head = 0, list[str](), f"error: {command}"
    try:
        work()
    except* KVBusError as group:
        errors = leaves(group)
        status = 2 if any(isinstance(one, ConfigError) for one in errors) else 1
        reasons = list(dict.fromkeys(map(str, errors)))
    except* KeyboardInterrupt:
        status, reasons, head = 130, ["ended by Ctrl-C"], command
    report(reasons)
    sys.stderr.writelines(f"{head}: {printable(reason)}\n" for reason in reasons)
    if status:
        raise typer.Exit(status)
