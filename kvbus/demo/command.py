"""The command ``kvbus demo``: what it waits for, its output, its exit status."""

import sys

import anyio
import typer

from kvbus.console import Console
from kvbus.demo.options import DemoOptions
from kvbus.demo.report import print_report
from kvbus.demo.run import run_demo
from kvbus.errors import ConfigError
from kvbus.options import with_options
from kvbus.output import waiting_for, write_json


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
    with waiting_for("the demo") as wait_for:

        def on_progress(what: str, num_done: int, num_in_all: int) -> None:
            wait_for(f"the demo: {what}" + (f" ({num_done}/{num_in_all})" if num_in_all else ""))

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
