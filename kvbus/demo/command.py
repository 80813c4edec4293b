"""The command ``kvbus demo``: its options, its progress bar, its exit status.

Refuses to succeed unless every output matched and nothing is left behind.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

import anyio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from kvbus.demo import arguments as args
from kvbus.demo.folder import private_folder
from kvbus.demo.options import DemoOptions
from kvbus.demo.outcome import DemoReport
from kvbus.demo.run import OnProgress, run_demo
from kvbus.demo.shape import Attention, Layout, Memory, ReadPath
from kvbus.demo.table import print_report
from kvbus.errors import ConfigError, KVBusError, leaves


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
    """Hand requests from a prefill engine to a decode engine, and compare with one engine alone.

    Starts two agents and two engines (a small transformer with a paged KV cache), plays the router,
    and compares every output, tokens and logits, with the same model run alone. Exit status 0 means
    that all were equal and that every block came back.
    """
    with _told_as_bad_parameter():
        options = args.demo_options(locals())
    _print(_run(options), as_one_json=as_one_json)


def _print(report: DemoReport, *, as_one_json: bool) -> None:
    """The table, the JSON, and exit status 1 when the report is not what it has to be."""
    print_report(report, Console(highlight=False))
    if as_one_json:
        sys.stdout.write(json.dumps(report.summary()) + "\n")
    if not report.ok:
        raise typer.Exit(1)


def _run(options: DemoOptions) -> DemoReport:
    """The report; exits when there is none."""
    failures: list[KVBusError] = []
    outcome: DemoReport | Signals | None = None
    try:
        with private_folder() as folder, _progress_bar() as on_progress:
            outcome = anyio.run(run_demo, options, folder, on_progress)
    except* KVBusError as errors:
        failures = leaves(errors)
    if outcome is None:
        sys.stderr.writelines(f"error: {failure.message}\n" for failure in failures)
        raise typer.Exit(1)
    if isinstance(outcome, Signals):
        sys.stderr.write(f"ended by {outcome.name}; every process of the demo has ended, too\n")
        raise typer.Exit(128 + outcome)
    return outcome


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
