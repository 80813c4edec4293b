"""The command ``kvbus demo``: its progress bar, its output, its exit status."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from kvbus.console import Console
from kvbus.demo.options import DemoOptions
from kvbus.demo.report import print_report
from kvbus.demo.run import OnProgress, run_demo
from kvbus.errors import ConfigError
from kvbus.options import with_options
from kvbus.output import write_json


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Hand requests from a prefill engine to a decode engine; compare with the model run alone.

    A SPEC is what an engine has of its own, such as `tp=2 layout=HND block=48`, with spaces or
    commas.

    * `tp`, `pp`: ranks that share the KV heads, stages that share the 4 layers (1)
    * `layout`: order of the axes within a block, `NHD` or `HND` (NHD); `cross_layer=true` puts
      all layers into one region
    * `block`: tokens in a block (16)
    * `ring`: a cache that no agent can map, copied through a ring of host blocks that holds such
      a part of it, as `0.5` (none)

    Exit status 0: all outputs are equal, tokens and logits, and every block came back.
    """
    if options.keep_logs is not None:
        try:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {options.keep_logs}: {error.strerror}"
            ) from error
    with _progress_bar() as on_progress:
        report = anyio.run(run_demo, options, on_progress)
    print_report(report, Console())
    sys.stderr.writelines(f"error: {message}\n" for message in report.trouble)
    if report.ended_by is not None:
        sys.stderr.write(f"ended by {report.ended_by.name}; all processes have ended, too\n")
    if options.as_one_json:
        write_json(report.summary())
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
