"""The command ``kvbus top``: looks at agents again and again, until Ctrl-C."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live as Screen

from kvbus.agent.config import AgentConfig
from kvbus.agent.sources import gather
from kvbus.console import Console
from kvbus.errors import ConfigError, PeerLost
from kvbus.output import fail, write_json
from kvbus.protocol.status import Live
from kvbus.top.ask import HttpAgent
from kvbus.top.figures import Between
from kvbus.top.screen import View, screen

DEFAULTS = ("127.0.0.1:7703", "127.0.0.1:7713")
"""The http_bind of the printed configurations."""
NO_AGENT = "no agent answers; is http_bind set, and is it this address?"


def top(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST:PORT]...",
            help=f"The http_bind of each agent; without any KVBUS_HTTP_BIND, else "
            f"{' and '.join(DEFAULTS)}.",
        ),
    ] = None,
    *,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The token of their ports (http_token_file); else KVBUS_HTTP_TOKEN_FILE.",
        ),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print what was between, and end.")
    ] = False,
    as_one_json: Annotated[
        bool, typer.Option("--json", help="Look once, print one JSON object, and end.")
    ] = False,
) -> None:
    """Show what agents do now: handoffs and bytes a second, their stages, what is wrong."""
    looker = Looker(_agents(addresses, token_file), timeout_s=max(every, 2.0))
    with suppress(KeyboardInterrupt):
        if as_one_json:
            write_json({at: _as_json(found) for at, found in looker.look().items()})
        elif once:
            looker.look()
            time.sleep(every)
            Console().print(screen(looker.look()))
        else:
            _go_on(looker, every)
    if not looker.was_answered:
        fail(NO_AGENT, status=1, cause=PeerLost(NO_AGENT))


def _agents(addresses: Sequence[str] | None, token_file: Path | None) -> list[HttpAgent]:
    """Those that are named, else that of this pod, by the variables of its configuration."""
    try:
        ours = gather(AgentConfig, None, knows_all=False).values
        if token_file is None and ours.get("http_token_file"):
            token_file = Path(ours["http_token_file"])
        token = "" if token_file is None else token_file.read_text(encoding="utf-8").strip()
        our_bind = ours.get("http_bind")
        wanted = addresses or ([our_bind] if our_bind else DEFAULTS)
        return [HttpAgent.at(address, token) for address in wanted]
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--token-file: cannot read {token_file}: {error}", status=2, cause=error)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error


class Looker:
    """Looks at agents side by side, and keeps what it saw last of each."""

    def __init__(self, agents: Sequence[HttpAgent], *, timeout_s: float) -> None:
        self._agents, self._timeout_s = agents, timeout_s
        self._before: dict[str, Live] = {}
        self.was_answered = False

    def look(self) -> Mapping[str, View]:
        """By address: what happened since the last look, or why nothing is known."""
        with ThreadPoolExecutor(len(self._agents)) as threads:
            return dict(threads.map(self._look_at, self._agents))

    def _look_at(self, agent: HttpAgent) -> tuple[str, View]:
        before = self._before.pop(agent.url, None)
        try:
            now = agent.look(timeout_s=self._timeout_s)
        except PeerLost as error:
            return agent.url, error.message
        self.was_answered, self._before[agent.url] = True, now
        return agent.url, Between(now, before)


def _go_on(looker: Looker, every_s: float) -> None:
    console = Console()
    while not console.is_terminal:
        console.print(screen(looker.look()))
        time.sleep(every_s)
    first = screen(looker.look())
    with Screen(first, console=console, screen=True, auto_refresh=False) as shown:
        while True:
            time.sleep(every_s)
            shown.update(screen(looker.look()), refresh=True)


def _as_json(view: View) -> object:
    return {"error": view} if isinstance(view, str) else view.now
