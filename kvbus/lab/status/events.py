"""``kvbus status --events``: each event of an agent as a line of JSON, with what was missed."""

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import anyio

from kvbus.bus import ClientCurve, EventListener, EventSubscriber, ask_agent, new_context
from kvbus.errors import ConfigError, ErrorCode, KVBusError, RequestTimeout
from kvbus.output import json_text, write_text
from kvbus.protocol.envelope import Notice
from kvbus.protocol.events import Heartbeat
from kvbus.protocol.message import EVENTS, may_hear
from kvbus.protocol.status import AgentStatus, Status
from kvbus.text import printable

NAMES = [name for name in EVENTS if name != Heartbeat.op]
IDS = ("request_id", "offer_id", "fetch_id")
ANSWER_S, RETRY_S = 3.0, 1.0
SILENCE_S = 10.0
"""Longer than some heartbeats of an agent with the default configuration."""
TRUSTED = "our key trusted as observer, router or decode"


def topics_of(only: Sequence[str]) -> list[str]:
    """The events that one of these patterns matches; raises `ConfigError` if one matches none."""
    for pattern in only:
        if not fnmatch.filter(NAMES, pattern):
            raise ConfigError(f"--only {pattern}: there is no such event; {', '.join(NAMES)} are")
    return [name for name in NAMES if any(fnmatch.fnmatchcase(name, one) for one in only)]


@dataclass(slots=True)
class Lines(EventListener):
    """Writes lines; ``left`` is how many events are still wanted, below 0 for all.

    ``heard`` are the topics that have begun: what came before that is no gap. ``heard_at`` is when
    something came last.
    """

    agent: str
    request: str
    left: int
    heard_at: float = field(default_factory=anyio.current_time)
    ended: anyio.Event = field(default_factory=anyio.Event)
    heard: set[str] = field(default_factory=set)

    def on_event(self, endpoint: str, event: Notice) -> None:
        self.heard_at = anyio.current_time()
        self.heard.add(event.op)
        if self.request and self.request not in (event.body.get(name) for name in IDS):
            return
        self._write(event.boot, event.op, {"seq": event.seq, **event.body})
        self.left -= 1
        if self.left == 0:
            self.ended.set()

    def on_boot(self, endpoint: str, boot: str) -> None:
        self._write(boot, "boot", {})

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        self.heard_at = anyio.current_time()
        self.heard.update(EVENTS)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        if topic in self.heard:
            self._write(boot, "gap", {"topic": topic})

    def _write(self, boot: str, event: str, told: Mapping[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        ours = {"at": at, "agent": self.agent, "boot": boot, "event": event}
        line = {**ours, **told, **ours}  # no body takes the place of what is ours
        if not self.ended.is_set() and not write_text(json_text(line) + "\n"):
            self.ended.set()


async def follow(
    peer: str, curve: ClientCurve | None, topics: list[str], request: str, count: int
) -> None:
    """Write the events of the agent at ``peer`` until ``count`` of them came; 0: without an end.

    Raises `KVBusError` when the agent refuses to tell, or to have its events heard.
    """
    status = await _status_of(peer, curve)
    if not status.events_endpoint:
        raise ConfigError("the agent is of an earlier version, which does not tell of its events")
    if status.view is not None and status.view.roles and not may_hear(status.view.roles):
        wrong = f"our key is trusted there as {' and '.join(status.view.roles)}, which hears no"
        raise KVBusError(f"{wrong} events; wanted is {TRUSTED}", code=ErrorCode.FORBIDDEN)
    lines = Lines(status.agent_id, request, count or -1)
    keys, server_key = (curve.keys, curve.server_key) if curve else (None, "")
    with new_context() as context:
        subscriber = EventSubscriber(context, lines, topics=topics, keys=keys)
        async with anyio.create_task_group() as tasks:
            subscriber.add(status.events_endpoint, server_key=server_key)
            tasks.start_soon(subscriber.run)
            while not lines.ended.is_set():
                with anyio.CancelScope(deadline=lines.heard_at + SILENCE_S):
                    await lines.ended.wait()
                if lines.ended.is_set() or anyio.current_time() < lines.heard_at + SILENCE_S:
                    continue
                # Nothing comes. An agent that came back may have its events elsewhere.
                lines.heard_at, before = anyio.current_time(), status.events_endpoint
                status = await _status_of(peer, curve, is_known=True)
                if status.events_endpoint == before:
                    _say(f"no events come from {before}: is that port open, and {TRUSTED}?")
                    continue
                _say(f"the events are at {status.events_endpoint} now, no longer at {before}")
                subscriber.remove(before)
                subscriber.add(status.events_endpoint, server_key=server_key)
            tasks.cancel_scope.cancel()


async def _status_of(
    peer: str, curve: ClientCurve | None, *, is_known: bool = False
) -> AgentStatus:
    """Its answer, for which it is asked again and again.

    Raises `KVBusError` when an agent that is not known yet refuses.
    """
    question, is_said = Status(key=curve.keys.public if curve else ""), False
    while True:
        try:
            return await ask_agent(peer, question, timeout_s=ANSWER_S, curve=curve)
        except KVBusError as error:
            if not (is_known or isinstance(error, RequestTimeout)):
                raise
            if not is_said:
                _say(f"no answer from {peer}, which is asked again: {error.message}")
            is_said = True
            await anyio.sleep(RETRY_S)


def _say(text: str) -> None:
    sys.stderr.write(f"kvbus status: {printable(text)}\n")
