"""The command line ``kvbus``: only the list of its commands.

Refuses to do any work: each command is a function of the module that it is imported from.
"""

from importlib.metadata import version
from typing import Annotated

import typer

from kvbus.bench.cases.command import bench
from kvbus.bench.sides.command import bench_decode, bench_prefill
from kvbus.conform.command import conform
from kvbus.demo.command import demo
from kvbus.demo.side_commands import demo_decode, demo_prefill
from kvbus.doctor.command import doctor
from kvbus.keys.command import keys
from kvbus.lab.status.command import status
from kvbus.planning.command import plan
from kvbus.trace.command import trace

app = typer.Typer(
    help="Moves the KV cache of LLM requests from a prefill engine to a decode engine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (
    demo,
    demo_prefill,
    demo_decode,
    bench,
    bench_prefill,
    bench_decode,
    plan,
    doctor,
    conform,
    status,
    trace,
):
    app.command()(command)
app.add_typer(keys, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvbus {version('kvbus')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The options before a command."""
