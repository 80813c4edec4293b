"""The command ``kvbus demo``: its options, its progress bar, its exit status."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from kvbus.demo import arguments as args
from kvbus.demo.model_config import Attention
from kvbus.demo.options import DemoOptions, Layout, Memory, ReadPath
from kvbus.demo.report import DemoReport
from kvbus.demo.run import OnProgress, run_demo
from kvbus.demo.table import print_report
from kvbus.errors import ConfigError


def demo(
    *,
    requests: args.Requests = 12,
    concurrency: args.Concurrency = 4,
    max_new_tokens: args.MaxNewTokens = 24,
    prompt_file: args.PromptFile = None,
    keep_logs: args.KeepLogs = None,
    as_one_json: args.AsOneJson = False,
    layout: args.BlockLayout = Layout.NHD,
    block_size: args.BlockSize = 16,
    cross_layer: args.CrossLayer = False,
    ring_share: args.RingShare = None,
    prefill_tp: args.PrefillTp = 1,
    prefill_pp: args.PrefillPp = 1,
    prefill_layout: args.PrefillLayout = None,
    prefill_block_size: args.PrefillBlockSize = None,
    prefill_cross_layer: args.PrefillCrossLayer = False,
    prefill_memory: args.PrefillMemory = Memory.SHARED,
    prefill_chunk: args.PrefillChunk = None,
    decode_tp: args.DecodeTp = 1,
    decode_pp: args.DecodePp = 1,
    decode_layout: args.DecodeLayout = None,
    decode_block_size: args.DecodeBlockSize = None,
    decode_cross_layer: args.DecodeCrossLayer = False,
    decode_memory: args.DecodeMemory = Memory.SHARED,
    path: args.Path_ = ReadPath.AUTO,
    attention: args.AttentionKind = Attention.GQA,
    kv_heads: args.KvHeads = None,
    window: args.Window = None,
    seed: args.Seed = 0,
    flip_one_byte: args.FlipOneByte = False,
) -> None:
    """Hand requests from a prefill engine to a decode engine; compare with the model run alone.

    Exit status 0: all outputs are equal, tokens and logits, and every block came back.
    """
    with _told_as_bad_parameter():
        options = args.demo_options(locals())
    _tell(_run(options), as_one_json=as_one_json)


def _run(options: DemoOptions) -> DemoReport:
    with _progress_bar() as on_progress:
        return anyio.run(run_demo, options, on_progress)


def _tell(report: DemoReport, *, as_one_json: bool) -> None:
    """The table, what went wrong, the JSON; the exit status is 0 when all is as it has to be."""
    print_report(report, Console(highlight=False))
    sys.stderr.writelines(f"error: {message}\n" for message in report.trouble)
    if report.ended_by is not None:
        sys.stderr.write(f"ended by {report.ended_by.name}; all processes have ended, too\n")
    if as_one_json:
        sys.stdout.write(json.dumps(report.summary()) + "\n")
    if report.ended_by is not None:
        raise typer.Exit(128 + report.ended_by)
    if not report.ok:
        raise typer.Exit(1)


@contextmanager
def _progress_bar() -> Iterator[OnProgress]:
    """A bar on stderr while it is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("starting", total=None)

        def on_progress(what: str, num_done: int, num_in_all: int) -> None:
            if num_in_all:
                what = f"{what} ({num_done}/{num_in_all})"
            if not num_done:
                progress.reset(bar)
            progress.update(bar, description=what, completed=num_done, total=num_in_all or None)

        yield on_progress


@contextmanager
def _told_as_bad_parameter() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error
