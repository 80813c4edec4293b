"""The command ``kvbus status``: what an agent holds now, by its peer socket.

Refuses to wait longer than it was told.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvbus.bus import ask_agent
from kvbus.console import Console
from kvbus.errors import ConfigError, KVBusError, RequestTimeout
from kvbus.keys.asker import KeyFile, ServerKey, curve_of
from kvbus.output import fail, write_json
from kvbus.protocol.status import AgentStatus, Sharing, Status


def status(
    endpoint: Annotated[
        str,
        typer.Argument(metavar="ENDPOINT", help="The agent's peer address, tcp://HOST:PORT."),
    ],
    *,
    timeout: Annotated[
        float, typer.Option(min=0.01, max=3600, metavar="SECONDS", help="How long to wait for it.")
    ] = 3.0,
    fetch: Annotated[
        str, typer.Option(metavar="ID", help="Also tell what happened to a fetch of the agent.")
    ] = "",
    offer: Annotated[
        str, typer.Option(metavar="ID", help="Also tell what happened to an offer of the agent.")
    ] = "",
    key_file: KeyFile = None,
    server_key: ServerKey = "",
    as_one_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask an agent for its engines and for what it holds."""
    try:
        question = Status(fetch_id=fetch, offer_id=offer)
        curve = curve_of(key_file, server_key)
        answer = anyio.run(partial(ask_agent, endpoint, question, timeout_s=timeout, curve=curve))
    except RequestTimeout as error:
        fail(f"no agent answered at {endpoint} within {timeout:g} s", status=1, cause=error)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error
    except KVBusError as error:
        fail(f"{endpoint}: {error.code}: {error.message}", status=1, cause=error)
    if as_one_json:
        write_json(answer)
    else:
        console = Console()
        console.print(f"{answer.agent_id}: {answer.role} agent, {_state(answer)}", soft_wrap=True)
        console.print(status_table(answer))
        if fetch or offer:
            console.print(f"\nstory of {fetch or offer}:" if answer.story else "\nno such entry")
        for line in answer.story:
            console.print(line, soft_wrap=True)


def _state(answer: AgentStatus) -> str:
    return "draining" if answer.draining else "serving"


def status_table(answer: AgentStatus) -> Table:
    """Two columns: what, and how much of it."""
    table = Table("what", "value", box=SIMPLE_HEAD, show_edge=False)
    for engine_id, is_ready in answer.engines.items():
        table.add_row(f"engine {engine_id}", "ready" if is_ready else "not ready")
    if not answer.engines:
        table.add_row("engines", "none")
    ports = ", ".join(answer.data_endpoints) or "no TCP port"
    untold = "told with a key, or to the user of the agent"
    table.add_row("NIXL listens at", untold if answer.sharing is None else ports)
    for what, state in _sharing_rows(answer.sharing):
        table.add_row(what, state)
    for endpoint, silent_s in answer.silent_peers.items():
        table.add_row(f"peer {endpoint}", f"has not answered for {silent_s:.0f} s")
    for what, count in answer.counts.items():
        table.add_row(what.replace("_", " "), str(count))
    return table


def _sharing_rows(sharing: Sharing | None) -> Iterator[tuple[str, str]]:
    """What is mapped between agents of one machine, and why something is not."""
    if sharing is None:
        return
    if sharing.closed:
        yield "shared memory", sharing.closed
    if sharing.path:
        yield "lends memory at", sharing.path
    by_reason: dict[str, list[str]] = {}
    for engine, state in sharing.engines.items():
        if state == "open":
            yield f"memory of {engine}", "mapped here"
        else:
            by_reason.setdefault(state, []).append(engine)
    for reason, engines in by_reason.items():
        who = engines[0] if len(engines) == 1 else f"{len(engines)} engines"
        yield f"memory of {who}", f"not mapped: {reason}"
