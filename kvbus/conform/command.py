"""The command ``kvbus conform``: its options, its progress, its exit status.

Refuses a wrong option or a command that cannot be started with one line and exit status 2.
"""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvbus.conform.book import Outcome
from kvbus.conform.play import play, scenes_of
from kvbus.conform.report import exit_status_of, print_report, sentence_of
from kvbus.conform.stage import START_S
from kvbus.console import Console
from kvbus.errors import ConfigError
from kvbus.output import fail, write_json, write_text
from kvbus.protocol.engine import AgentRole

Role = Annotated[AgentRole, typer.Option(help="What the engine is.")]
Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Starts the engine.")]
Patience = Annotated[
    float,
    typer.Option(
        min=1, max=600, metavar="SECONDS", help="How long the engine may take to do one thing."
    ),
]
Start = Annotated[
    float,
    typer.Option(
        min=1, max=3600, metavar="SECONDS", help="How long it may take to register, each time."
    ),
]
Scenes = Annotated[
    list[str] | None,
    typer.Option("--scene", metavar="SCENE", help="Play this scene only; may be repeated."),
]
Log = Annotated[Path | None, typer.Option(metavar="FILE", help="Where the engine's stderr goes.")]
AsOneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def conform(
    *,
    command: Command,
    role: Role,
    patience: Patience = 10.0,
    start: Start = START_S,
    scene: Scenes = None,
    log: Log = None,
    as_one_json: AsOneJson = False,
) -> None:
    """Check whether an engine keeps to the protocol, by playing its agent.

    COMMAND is started with `KVBUS_ATTACH`, the path of the attach socket, and `KVBUS_ROLE`. It
    is told on its stdin what to offer or fetch, and says on its stdout what became of it: see
    docs/conformance.md. The agent loses replies, repeats notices, dies and comes back; it maps the
    engine's memory and compares it. It needs no NIXL, no GPU and no other agent.

    Exit status 0: no rule was broken. 1: one was. 2: a mistake in an option or the command.
    """
    wanted = scene or []
    known = scenes_of(role)
    if unknown := [name for name in wanted if name not in known]:
        problem = f"--scene: no scene {', '.join(unknown)}; there are {', '.join(known)}"
        fail(problem, status=2, cause=ValueError(problem))
    with (
        tempfile.TemporaryDirectory(prefix="kvbus-conform-") as folder,
        Console(stderr=True).status("starting") as line,
    ):
        try:
            outcomes = play(
                role,
                command,
                log=log or Path(folder) / "engine.log",
                patience_s=patience,
                start_s=start,
                only=wanted,
                on_scene=lambda name: line.update(f"playing {name}"),
            )
        except ConfigError as error:
            fail(error.message, status=2, cause=error)
    if as_one_json:
        write_json(as_json(outcomes, role))
    else:
        write_text(_as_text(outcomes))
    raise typer.Exit(exit_status_of(outcomes))


def as_json(outcomes: list[Outcome], role: AgentRole) -> dict[str, object]:
    """What ``--json`` prints; docs/conformance.md says what each key means."""
    return {
        "kvbus": version("kvbus"),
        "role": role.value,
        "sentence": sentence_of(outcomes),
        "exit_status": exit_status_of(outcomes),
        "rules": [msgspec.structs.asdict(outcome) for outcome in outcomes],
    }


def _as_text(outcomes: list[Outcome]) -> str:
    console = Console()
    with console.capture() as printed:
        print_report(outcomes, console)
    return "".join(f"{line.rstrip()}\n" for line in printed.get().splitlines())
