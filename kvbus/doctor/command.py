"""The command ``kvbus doctor``: its options, its progress, its exit status.

Refuses a wrong option or configuration with one line and exit status 2.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbus.doctor.finding import Finding, as_json, exit_status_of
from kvbus.doctor.probe.agents import wanted_agents
from kvbus.doctor.probe.children import Budget
from kvbus.doctor.report import print_report
from kvbus.doctor.run_checks import Family, run_checks
from kvbus.errors import ConfigError
from kvbus.output import fail, write_json, write_text

EACH_SHARE = 0.25
"""The part of the whole time that one probe may take."""

Configs = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Check the ports, folder and staging of this agent; may be repeated. "
        "Without it those of both agents' defaults.",
    ),
]
Families = Annotated[
    list[Family] | None,
    typer.Option(
        metavar="FAMILY", help=f"Check one family only: {', '.join(Family)}; may be repeated."
    ),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.1, max=3600, metavar="SECONDS", help="How long all measurements may take."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Let warnings fail, too.")]
AsOneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

HELP = """Say what works on this machine for kvbus, what does not, why, and what to do.

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


def doctor(
    config: Configs = None,
    only: Families = None,
    timeout: Timeout = 60.0,
    strict: Strict = False,
    as_one_json: AsOneJson = False,
) -> None:
    """See `HELP`."""
    try:
        agents = wanted_agents(config or [])
    except ConfigError as error:
        fail(f"--config: {error.message}", status=2, cause=error)
    with _progress() as on_progress:
        budget = Budget(timeout, EACH_SHARE * timeout)
        findings = run_checks(only or Family, agents, budget, on_progress)
    if as_one_json:
        write_json(as_json(findings, version=version("kvbus"), strict=strict))
    else:
        write_text(_as_text(findings))
    raise typer.Exit(exit_status_of(findings, strict=strict))


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Something that shows what is being done, on a terminal only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as line:
        yield lambda what: line.update(f"checking {what}")


def _as_text(findings: list[Finding]) -> str:
    console = Console(highlight=False)
    with console.capture() as printed:
        print_report(findings, console)
    return "".join(f"{line.rstrip()}\n" for line in printed.get().splitlines())
