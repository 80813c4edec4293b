"""The command ``kvbus trace``: one request over all agents, and where its time went."""

import time
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.text import Text

from kvbus.console import Console
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.asker import KeyFile, ServerKeys, curves_of
from kvbus.output import fail, write_json
from kvbus.text import printable
from kvbus.trace.ask import AgentToAsk, Asked, Questions
from kvbus.trace.chrome import chrome_file
from kvbus.trace.failure import failure
from kvbus.trace.timeline import Timeline
from kvbus.trace.waterfall import reasons, waterfall


def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Of the request, as the agents log it, or of an offer or a fetch; or what the "
            "router called it in a rendezvous, also by transfer_id.",
        ),
    ],
    *,
    peer: Annotated[
        list[str],
        typer.Option(
            metavar="ENDPOINT",
            help="An agent's peer address, tcp://HOST:PORT; for several agents once for each. A "
            "decode agent names the prefill agent, which is asked as well.",
        ),
    ],
    chrome: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a file for Perfetto (ui.perfetto.dev) or Chrome."
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.01, max=3600, metavar="SECONDS", help="How long to wait for each."),
    ] = 3.0,
    key_file: KeyFile = None,
    server_key: ServerKeys = None,
    as_one_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show one request over all agents, on one clock, and where its time went."""
    try:
        keys, server_keys = curves_of(key_file, server_key or [], len(peer))
        agents = [AgentToAsk(at, key) for at, key in zip(peer, server_keys, strict=True)]
        asked = anyio.run(Questions(request_id, keys=keys, timeout_s=timeout).ask, agents)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error
    for endpoint, problem in asked.problems.items():
        if isinstance(problem, ConfigError):
            raise typer.BadParameter(problem.message) from problem
        warning = f"warning: {endpoint}: {problem.code}: {problem.message}"
        typer.echo(printable(warning), err=True)
    timeline = Timeline.of(asked.traces, now_s=time.monotonic())
    if not timeline.agents:
        fail(_unknown(request_id, asked), status=1, cause=KVBusError("no agent knows it"))
    if chrome is not None:
        _write(chrome, chrome_file(timeline, request_id))
    if as_one_json:
        write_json(_as_map(request_id, timeline, asked))
        return
    _draw(timeline, Console())


def _draw(timeline: Timeline, console: Console) -> None:
    """The last line says how the fetch failed, or where the time went."""
    console.print(waterfall(timeline, width=console.width))
    failed = failure(timeline)
    for error, label in reasons(timeline).items():
        if not failed.endswith(error):
            console.print(Text(f"{label}: {error}", style="red"), soft_wrap=True)
    console.print(f"\n{timeline.verdict()}", soft_wrap=True)
    if failed:
        console.print(Text(failed, style="red"), soft_wrap=True)


def _unknown(request_id: str, asked: Asked) -> str:
    if not asked.traces:
        return "no agent answered, so nothing is known; see that --peer is the peer address of one"
    heard = ", ".join(one.answer.agent_id for one in asked.traces)
    return (
        f"no agent remembers '{request_id}': asked {heard}. Agents forget the oldest of what has "
        "ended (max_ended_bytes), and all of it when they end"
    )


def _write(path: Path, content: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(content)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}", status=1, cause=error)


def _as_map(request_id: str, timeline: Timeline, asked: Asked) -> dict[str, object]:
    """Times in seconds from the start of the timeline."""
    return {
        "id": request_id,
        "total_s": timeline.total_s,
        "verdict": failure(timeline) or timeline.verdict(),
        "shares_s": timeline.shares(),
        "agents": [
            {
                "endpoint": one.endpoint,
                "agent_id": one.answer.agent_id,
                "role": one.answer.role,
                "boot": one.answer.boot,
                "clock_offset_s": one.clock.offset_s,
                "clock_error_s": one.clock.error_s,
                "cut": one.answer.cut,
                "spans": [
                    {
                        "name": span.name,
                        "about": span.about,
                        "depth": span.depth,
                        "start_s": span.start_s - timeline.start_s,
                        "end_s": None if span.end_s is None else span.end_s - timeline.start_s,
                        "error": span.error,
                        "attributes": span.attributes,
                    }
                    for span in one.spans
                ],
            }
            for one in timeline.agents
        ],
        "problems": {at: error.message for at, error in asked.problems.items()},
    }
