"""The command ``kvbus events``: the events of an agent as JSON lines, with what was missed.

Refuses to ask for anything but the status, which names the address of the events.
"""

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any

import anyio
import typer

from kvbus.bus import ClientCurve, EventListener, EventSubscriber, ask_agent, new_context
from kvbus.errors import ConfigError, ErrorCode, KVBusError, RequestTimeout
from kvbus.keys.asker import KeyFile, ServerKey, curve_of
from kvbus.output import fail, json_text, write_text
from kvbus.protocol.envelope import Notice
from kvbus.protocol.events import Heartbeat
from kvbus.protocol.message import EVENTS, may_hear
from kvbus.protocol.status import AgentStatus, Status
from kvbus.text import printable

NAMES = [name for name in EVENTS if name != Heartbeat.op]
ANSWER_S, RETRY_S = 3.0, 1.0
SILENCE_S = 10.0
"""Longer than some heartbeats of an agent with the default configuration."""
NO_EVENTS = (
    "the agent answers, but no events come from {}: is that port open on the way, and our key "
    "trusted as observer, router or decode?"
)
NOT_HEARD = (
    "our key is trusted there as {}, which hears no events: use a --key-file that is trusted as "
    "observer, router or decode"
)
IDS = ("request_id", "offer_id", "fetch_id")


def events(
    endpoint: Annotated[
        str,
        typer.Argument(metavar="ENDPOINT", help="The agent's peer address, tcp://HOST:PORT."),
    ],
    *,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="EVENT", help="Only such events, as 'offer.*'; may be repeated."),
    ] = None,
    request: Annotated[
        str,
        typer.Option(metavar="ID", help="Only events of this request_id, offer_id or fetch_id."),
    ] = "",
    count: Annotated[
        int, typer.Option(min=0, metavar="N", help="End after so many events; 0: never.")
    ] = 0,
    key_file: KeyFile = None,
    server_key: ServerKey = "",
) -> None:
    """Write the events of an agent, each as a line of JSON, until Ctrl-C.

    A line `boot` begins the events of each process of the agent, `gap` says that events of a
    topic were missed.
    """
    try:
        topics = _topics(only or [])
        curve = curve_of(key_file, server_key)
        with suppress(KeyboardInterrupt):
            anyio.run(_follow, _Asker(endpoint, curve), topics, request, count)
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error
    except KVBusError as error:
        fail(f"{endpoint}: {error.code}: {error.message}", status=1, cause=error)


def _topics(only: Sequence[str]) -> list[str]:
    """The names that one of these patterns matches; all when there is none."""
    for pattern in only:
        if not fnmatch.filter(NAMES, pattern):
            raise ConfigError(f"--only {pattern}: there is no such event; {', '.join(NAMES)} are")
    return [name for name in NAMES if any(fnmatch.fnmatchcase(name, one) for one in only)]


@dataclass(slots=True)
class _Asker:
    """Asks one agent for its status until it answers, and says once that it does not."""

    endpoint: str
    curve: ClientCurve | None
    is_known: bool = False
    was_away: bool = False

    async def ask(self) -> AgentStatus:
        """Raises `KVBusError` when the first answer is a refusal."""
        self.was_away = False
        question = Status(key=self.curve.keys.public if self.curve else "")
        while True:
            try:
                status = await ask_agent(
                    self.endpoint, question, timeout_s=ANSWER_S, curve=self.curve
                )
            except KVBusError as error:
                if not (self.is_known or isinstance(error, RequestTimeout)):
                    raise
                if not self.was_away:
                    _say(f"no answer from {self.endpoint}, which is asked again: {error.message}")
                self.was_away = True
                await anyio.sleep(RETRY_S)
            else:
                self.is_known = True
                return status


@dataclass(slots=True)
class _Stream(EventListener):
    """Writes lines; ``left`` is how many events are still wanted, below 0 for all.

    ``heard`` are the topics that have begun for it: what came before that is no gap.
    """

    agent: str
    request: str
    left: int
    ended: anyio.Event = field(default_factory=anyio.Event)
    looked_at: float = field(default_factory=anyio.current_time)
    """When something came last, or the agent was asked why nothing comes."""
    is_quiet: bool = False
    heard: set[str] = field(default_factory=set)

    def on_event(self, endpoint: str, event: Notice) -> None:
        self._hear(endpoint)
        self.heard.add(event.op)
        if self.request and self.request not in (event.body.get(name) for name in IDS):
            return
        self._write(event.boot, event.op, {"seq": event.seq}, event.body)
        self.left -= 1
        if self.left == 0:
            self.ended.set()

    def on_boot(self, endpoint: str, boot: str) -> None:
        self._write(boot, "boot")

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        self._hear(endpoint)
        self.heard.update(EVENTS)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        if topic in self.heard:
            self._write(boot, "gap", {"topic": topic})

    def _hear(self, endpoint: str) -> None:
        self.looked_at = anyio.current_time()
        if self.is_quiet:
            _say(f"events come again from {endpoint}")
        self.is_quiet = False

    def _write(self, boot: str, event: str, *told: Mapping[str, Any]) -> None:
        if self.ended.is_set():
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        line = {"at": now, "agent": self.agent, "boot": boot, "event": event}
        for name, value in (pair for fields in told for pair in fields.items()):
            line.setdefault(name, value)  # no body takes the place of what is there
        if not write_text(json_text(line) + "\n"):
            self.ended.set()


async def _follow(asker: _Asker, topics: list[str], request: str, count: int) -> None:
    status = await asker.ask()
    if not status.events_endpoint:
        raise ConfigError("the agent is of an earlier version, which does not tell of its events")
    if status.view is not None and status.view.roles and not may_hear(status.view.roles):
        trusted_as = " and ".join(status.view.roles)
        raise KVBusError(NOT_HEARD.format(trusted_as), code=ErrorCode.FORBIDDEN)
    stream = _Stream(status.agent_id, request, count or -1)
    server_key = asker.curve.server_key if asker.curve else ""
    with new_context() as context:
        subscriber = EventSubscriber(
            context,
            stream,
            topics=topics,
            keys=asker.curve.keys if asker.curve else None,
        )
        subscriber.add(status.events_endpoint, server_key=server_key)

        async def look_again() -> None:
            """An agent that came back may have its events elsewhere."""
            while True:
                await anyio.sleep_until(stream.looked_at + SILENCE_S)
                if anyio.current_time() < stream.looked_at + SILENCE_S:
                    continue
                was_quiet, stream.is_quiet = stream.is_quiet, True
                stream.looked_at = anyio.current_time()
                before = subscriber.endpoints[0]
                now = (await asker.ask()).events_endpoint
                if now != before:
                    _say(f"the events are at {now} now, no longer at {before}")
                    subscriber.remove(before)
                    subscriber.add(now, server_key=server_key)
                elif not (asker.was_away or was_quiet):
                    _say(NO_EVENTS.format(now))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(subscriber.run)
            tasks.start_soon(look_again)
            await stream.ended.wait()
            tasks.cancel_scope.cancel()


def _say(text: str) -> None:
    sys.stderr.write(f"kvbus events: {printable(text)}\n")
