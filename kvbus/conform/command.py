"""The command ``kvbus conform``."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvbus.conform.rules import RuleOutcome, Verdict
from kvbus.conform.scenes import PATIENCE_S, START_S, play, scenes_of
from kvbus.errors import ConfigError
from kvbus.options import completed_by
from kvbus.output import waiting_for, write_json, write_text
from kvbus.progress import Progress
from kvbus.protocol.engine import AgentRole
from kvbus.text import printable

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
    typer.Option(
        "--scene",
        metavar="SCENE",
        help="Play this scene only; may be repeated.",
        autocompletion=completed_by(name for role in AgentRole for name in scenes_of(role)),
    ),
]
Log = Annotated[Path | None, typer.Option(metavar="FILE", help="Where the engine's stderr goes.")]
AsOneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def conform(
    *,
    command: Command,
    role: Role,
    patience: Patience = PATIENCE_S,
    start: Start = START_S,
    scene: Scenes = None,
    log: Log = None,
    as_one_json: AsOneJson = False,
) -> None:
    """Check whether an engine keeps to the protocol, by playing its agent.

    COMMAND is started with `KVBUS_ATTACH`, the path of the attach socket, and `KVBUS_ROLE`. It
    reads on stdin what to offer or fetch, and reports the results on stdout: see
    https://kvbus.github.io/kvbus/conformance/. The agent replies late, refuses, crashes and
    restarts; it maps the engine's memory and compares it. No NIXL, GPU or other agent is needed.

    Exit status 0: no rule was broken. 1: a rule was broken. 2: bad option or command.
    """
    wanted = scene or []
    known = scenes_of(role)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"--scene: no scene {', '.join(unknown)}; there are {', '.join(known)}")
    scenes = Progress(len(set(wanted) or known))

    def on_scene(name: str) -> None:
        scenes.begin(f"the scene {name}")
        wait_for(f"the scene {name}")

    with scenes, waiting_for("the engine to start") as wait_for:
        outcomes = play(
            role,
            command,
            log=log,
            patience_s=patience,
            start_s=start,
            only=wanted,
            on_scene=on_scene,
        )
    if as_one_json:
        report = {
            "kvbus": version("kvbus"),
            "role": role.value,
            "sentence": sentence_of(outcomes),
            "exit_status": exit_status_of(outcomes),
            "rules": [msgspec.structs.asdict(outcome) for outcome in outcomes],
        }
        write_json(report)
    else:
        write_text(report_of(outcomes))
    raise typer.Exit(exit_status_of(outcomes))


def sentence_of(outcomes: Sequence[RuleOutcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    failed = ", ".join(one.name for one in outcomes if one.verdict is Verdict.FAILED)
    if failed:
        return f"the engine does not conform: {failed}"
    untried = counts[Verdict.UNTRIED]
    rest = f"; {untried} could not be tried" if untried else ""
    return f"the engine conforms to all {counts[Verdict.PASSED]} rules that were tried{rest}"


def exit_status_of(outcomes: Sequence[RuleOutcome]) -> int:
    verdicts = {outcome.verdict for outcome in outcomes}
    return int(Verdict.FAILED in verdicts or Verdict.PASSED not in verdicts)


def report_of(outcomes: Sequence[RuleOutcome]) -> str:
    lines = []
    is_tried = any(one.verdict is Verdict.PASSED for one in outcomes)
    for one in outcomes if is_tried else ():
        why = f" {one.seen[0]}." if one.verdict is Verdict.UNTRIED else ""
        lines.append(_filled(f"{one.verdict:<7} {one.name:<24} ", one.rule + why))
    for one in outcomes:
        if one.verdict is Verdict.FAILED:
            lines += [*([""] if lines else []), f"failed {one.name}: {one.rule}"]
            lines.append(f"  page  {one.page}")
            lines += [f"  seen  {seen}" for seen in one.seen]
            lines += [f"  times {one.num_wrong} of {one.num_checks} checks"]
    return "".join(f"{printable(line)}\n" for line in (*lines, "", sentence_of(outcomes)))


def _filled(head: str, text: str) -> str:
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head))
