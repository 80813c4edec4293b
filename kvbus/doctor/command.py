"""The command ``kvbus doctor``: its options, its progress, its exit status.

Refuses a wrong option or configuration with one line and exit status 2.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbus.doctor.examine import Examination, Family
from kvbus.doctor.finding import Finding, exit_status_of
from kvbus.doctor.outcome import as_values
from kvbus.doctor.probe.agents import wanted_agents
from kvbus.doctor.probe.children import Budget
from kvbus.doctor.report import print_report
from kvbus.errors import ConfigError

EACH_SHARE = 0.25
"""The part of the whole time that one probe may take."""


def doctor(
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Check the ports, folder and staging of this agent; may be repeated. "
            "Without it those of both agents' defaults.",
        ),
    ] = None,
    only: Annotated[
        list[Family] | None,
        typer.Option(
            metavar="FAMILY",
            help=f"Check one family only: {', '.join(Family)}; may be repeated.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=3600, metavar="SECONDS", help="How long all measurements may take."
        ),
    ] = 60.0,
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail, too.")] = False,
    as_one_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what works on this machine for kvbus, what does not, why, and what to do.

    Run it as the user, in the container and with the environment of the agents: limits, `UCX_TLS`
    and what may be read of other processes are those of this command. It measures NIXL between
    processes of its own, in some ten seconds, and leaves nothing behind.

    * `ok`: as it should be; `note`: worth knowing, nothing to do
    * `warning`: kvbus works, but slower or less of it than it could
    * `error`: kvbus, or the agent of a `--config`, does not work here

    Exit status 0: no error, kvbus works. 1: an error, or with `--strict` a warning. 2: a mistake
    in an option or a configuration.

    In a script that waits for a machine to be ready: `kvbus doctor --config agent.toml`, before
    the agent is started. Where a fast fabric is a must, add `--strict`.
    """
    try:
        agents = wanted_agents(config or [])
    except ConfigError as error:
        sys.stderr.write(f"error: --config: {error.message}\n")
        raise typer.Exit(2) from error
    with _progress() as say:
        examination = Examination(agents, Budget(timeout, EACH_SHARE * timeout), say)
        findings = examination.findings(only or list(Family))
    _write(_as_json(findings, strict=strict) if as_one_json else _as_text(findings))
    raise typer.Exit(exit_status_of(findings, strict=strict))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Something that says what is being done, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as line:
        yield lambda what: line.update(f"checking {what}")


def _as_json(findings: list[Finding], *, strict: bool) -> str:
    return json.dumps(as_values(findings, version=version("kvbus"), strict=strict)) + "\n"


def _as_text(findings: list[Finding]) -> str:
    terminal, shown = Console(), StringIO()
    console = Console(
        file=shown, force_terminal=terminal.is_terminal, width=terminal.width, highlight=False
    )
    print_report(findings, console)
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())


def _write(text: str) -> None:
    """Write, if anybody reads: the exit status says what was found in any case."""
    if sys.stdout is None:  # Python found it closed
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"error: cannot write to stdout: {error.strerror}\n")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # some Pythons write what is left once more at exit
        os.close(nowhere)
