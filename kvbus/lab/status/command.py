"""The command ``kvbus status``: state of agents, or events of one agent."""

import fnmatch
import http.client
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
import msgspec
import typer

from kvbus.agent.config import AgentConfig
from kvbus.agent.sources import gather
from kvbus.bus import ClientCurve, EventListener, EventSubscriber, call_agent, new_context
from kvbus.console import text_of
from kvbus.errors import (
    ConfigError,
    ErrorCode,
    KVBusError,
    PeerLost,
    RemoteError,
    RequestTimeout,
    reason_of,
)
from kvbus.keys.client_options import KeyFile, ServerKey, curve_of
from kvbus.lab.status.screen import Between, View, screen
from kvbus.options import completed_by, with_options
from kvbus.output import fail, json_text, waiting_for, write_json, write_text
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import EVENTS, may_subscribe
from kvbus.protocol.tools import AgentStatus, Heartbeat, Live, Status
from kvbus.text import printable

DEFAULTS = ("127.0.0.1:7703", "127.0.0.1:7713")
CHECK_PATH = "to check the way there, run kvbus doctor --only peer --peer "
NONE = "no answer"
NAME_ONE = "name one: kvbus status HOST:PORT, its http_bind, or tcp://HOST:PORT, its peer address"
ADDRESS = re.compile(r"(https?://)?((?:\[[\da-fA-F:.%]+\]|[^\s/:\[\]]+):\d{1,5})/?")
MAX_BYTES = 16 << 20
NAMES = [name for name in EVENTS if name != Heartbeat.op]
IDS = ("request_id", "offer_id", "fetch_id")
ANSWER_S, RETRY_S = 3.0, 1.0
SILENCE_S = 10.0
TRUSTED = "our key trusted as observer, router or decode"


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="The peer address of an agent, tcp://HOST:PORT, or HOST:PORT of the http_bind of "
            f"one or more. Without any KVBUS_HTTP_BIND, else {' and '.join(DEFAULTS)}.",
        ),
    ] = None
    every: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=3600,
            metavar="SECONDS",
            help="Time between two polls of an HTTP port, over which rates are shown.",
        ),
    ] = 1.0
    events: Annotated[
        bool, typer.Option("--events", help="Write what happens at a peer address, until Ctrl-C.")
    ] = False
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EVENT",
            help="Such events, as 'offer.*'; may be repeated.",
            autocompletion=completed_by(NAMES),
        ),
    ] = None
    request: Annotated[
        str, typer.Option(metavar="ID", help="Events of this request_id, offer_id or fetch_id.")
    ] = ""
    count: Annotated[
        int, typer.Option(min=0, metavar="N", help="End after so many events; 0: never.")
    ] = 0
    fetch: Annotated[
        str, typer.Option(metavar="ID", help="Also show what happened to this fetch.")
    ] = ""
    offer: Annotated[
        str, typer.Option(metavar="ID", help="Also show what happened to this offer.")
    ] = ""
    timeout: Annotated[
        float, typer.Option(min=0.01, max=3600, metavar="SECONDS", help="How long to wait for one.")
    ] = 3.0
    key_file: KeyFile = None
    server_key: ServerKey = ""
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The token of HTTP ports; else that of KVBUS_HTTP_TOKEN_FILE."
        ),
    ] = None
    as_one_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    @property
    def peer(self) -> str:
        named = self.addresses or []
        return named[0] if len(named) == 1 and named[0].startswith("tcp://") else ""


@with_options(StatusOptions)
def status(options: StatusOptions) -> None:
    """Show what agents hold and do now, or what happens at one.

    A peer address shows what the agent holds. An HTTP port also shows rates of handoffs and bytes,
    where their time goes, and current faults.

    With `--events` each event is a line of JSON. A line `boot` precedes the events of each process
    of the agent. A line `gap` reports missed events of a topic.
    """
    peer = options.peer
    try:
        with suppress(*([KeyboardInterrupt] if options.events else [])):
            if peer:
                _query_peer(options)
            elif options.events or options.fetch or options.offer:
                raise ConfigError("--events, --fetch and --offer want one tcp://HOST:PORT")
            else:
                agents = _http_agents(options.addresses or [], options.token_file)
                _watch(agents, options.every, options.timeout, as_json=options.as_one_json)
    except RequestTimeout as error:
        address = peer.removeprefix("tcp://")
        view = HttpAgent(f"http://{address}", "").read(min(options.timeout, 1.0))
        is_http = not str(view).startswith(NONE)
        way = f"its http_bind is there: kvbus status {address}" if is_http else CHECK_PATH + peer
        lost = f"no agent answered at {peer} within {options.timeout:g} s; {way}"
        fail(lost, status=1, cause=error)
    except RemoteError as error:
        fail(f"{peer}: {error.code}: {error.message}", status=1, cause=error)


def _query_peer(options: StatusOptions) -> None:
    """Raise `RequestTimeout`, or `RemoteError` if the fetch or offer is unknown."""
    peer, curve = options.peer, curve_of(options.key_file, options.server_key)
    if options.events:
        topics = _topics_of(options.only or [])
        anyio.run(_follow, peer, curve, topics, options.request, options.count)
        return
    request = Status(fetch_id=options.fetch, offer_id=options.offer, faults=True)
    query = partial(call_agent, peer, request, timeout_s=options.timeout, curve=curve)
    with waiting_for(f"{peer} to answer"):
        reply = anyio.run(query)
    _print_reply(peer, reply, request, as_json=options.as_one_json)


def _print_reply(peer: str, reply: AgentStatus, request: Status, *, as_json: bool) -> None:
    name = request.fetch_id or request.offer_id
    if as_json:
        write_json(reply)
    else:
        no_metrics = Live(reply, boot="", now_s=0.0, metrics={}, recent=())
        history = ["", f"history of {name}:", *reply.history] if reply.history else ()
        write_text(text_of(screen({peer: Between(no_metrics)}), *history))
    if name and not reply.history:
        kind = "fetch" if request.fetch_id else "offer"
        raise RemoteError(
            f"no {kind} '{name}' is known there, or no longer", code=ErrorCode(f"{kind}_unknown")
        )


@dataclass(slots=True)
class HttpAgent:
    url: str
    token: str
    last: Live | None = None
    was_answered: bool = False

    def read(self, timeout_s: float) -> View:
        """The token is never sent to a proxy or a redirect target."""
        before, self.last = self.last, None
        at = urlsplit(self.url)
        secure = at.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with closing(kind(at.netloc, timeout=timeout_s)) as connection:
                connection.request("GET", "/live", headers=headers)
                answer = connection.getresponse()
                if answer.status != http.client.OK:
                    reason = answer.read(1000).decode(errors="replace").strip()
                    wants_token = answer.status == http.client.UNAUTHORIZED
                    here = "; here by --token-file FILE" if wants_token else ""
                    return f"{answer.status}: {reason}{here}"
                self.last = msgspec.json.decode(answer.read(MAX_BYTES), type=Live)
        except (OSError, http.client.HTTPException) as error:
            return f"{NONE}: {reason_of(error)}"
        except msgspec.MsgspecError as error:
            return f"this is no kvbus agent of this version: {reason_of(error)}"
        self.was_answered = True
        return Between(self.last, before)


def _watch(agents: Sequence[HttpAgent], every_s: float, timeout_s: float, *, as_json: bool) -> None:
    def read() -> dict[str, View]:
        urls = [agent.url for agent in agents]
        with waiting_for(f"{' and '.join(urls)} to answer"), ThreadPoolExecutor() as threads:
            answers = threads.map(partial(HttpAgent.read, timeout_s=timeout_s), agents)
            return dict(zip(urls, answers, strict=True))

    views = read()
    if as_json:
        answers = {at: {"error": v} if isinstance(v, str) else v.now for at, v in views.items()}
        write_json(answers)
    elif any(agent.was_answered for agent in agents):
        time.sleep(every_s)
        write_text(text_of(screen(read())))
    if not any(agent.was_answered for agent in agents):
        why = "; ".join(f"{at}: {view}" for at, view in views.items())
        lost = f"no agent answered ({why}); {NAME_ONE}"
        fail(lost, status=1, cause=PeerLost(lost))


def _http_agents(addresses: Sequence[str], token_file: Path | None) -> list[HttpAgent]:
    environment, token = gather(AgentConfig, None, knows_all=False).values, ""
    if path := token_file or environment.get("http_token_file"):
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--token-file: cannot read {path}: {reason}") from error
    own_bind = environment.get("http_bind")
    chosen = addresses or ([own_bind] if own_bind else DEFAULTS)
    return [HttpAgent(url, token) for url in dict.fromkeys(map(_url, chosen))]


def _url(address: str) -> str:
    if found := ADDRESS.fullmatch(address):
        return f"{found[1] or 'http://'}{found[2]}"
    raise ConfigError(
        f"'{address}' is neither HOST:PORT of an http_bind nor, alone, the peer "
        " address tcp://HOST:PORT of an agent"
    )


def _topics_of(only: Sequence[str]) -> list[str]:
    for pattern in only:
        if not fnmatch.filter(NAMES, pattern):
            raise ConfigError(f"--only {pattern}: there is no such event; {', '.join(NAMES)} are")
    return [name for name in NAMES if any(fnmatch.fnmatchcase(name, one) for one in only)]


@dataclass(slots=True)
class Lines(EventListener):
    """``left`` is below 0 for no limit. Losses before a topic's first event are not gaps."""

    agent: str
    request: str
    left: int
    is_silent: bool = True
    ended: anyio.Event = field(default_factory=anyio.Event)
    received: set[str] = field(default_factory=set)

    def on_event(self, endpoint: str, event: Notice) -> None:
        self.is_silent = False
        self.received.add(event.op)
        if self.request and self.request not in (event.body.get(name) for name in IDS):
            return
        self._write(event.boot, event.op, {"seq": event.seq, **event.body})
        self.left -= 1
        if self.left == 0:
            self.ended.set()

    def on_boot(self, endpoint: str, boot: str) -> None:
        self._write(boot, "boot", {})

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        self.is_silent = False
        self.received.update(EVENTS)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        if topic in self.received:
            self._write(boot, "gap", {"topic": topic})

    def _write(self, boot: str, event: str, body: Mapping[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        ours = {"at": at, "agent": self.agent, "boot": boot, "event": event}
        line = {**ours, **body, **ours}  # event bodies cannot override these fields
        if not self.ended.is_set() and not write_text(json_text(line) + "\n"):
            self.ended.set()


async def _follow(
    peer: str, curve: ClientCurve | None, topics: list[str], request: str, count: int
) -> None:
    """Print ``count`` events; 0 means no limit. Raises `KVBusError`."""
    status = await _await_status(peer, curve)
    if not status.events_endpoint:
        raise ConfigError("the agent is of an earlier version, which publishes no events endpoint")
    if status.view is not None and status.view.roles and not may_subscribe(status.view.roles):
        wrong = f"our key is trusted there as {' and '.join(status.view.roles)}, which receives no"
        raise KVBusError(f"{wrong} events; wanted is {TRUSTED}", code=ErrorCode.FORBIDDEN)
    lines = Lines(status.agent_id, request, count or -1)
    keys, server_key = (curve.keys, curve.server_key) if curve else (None, "")
    with new_context() as context:
        subscriber = EventSubscriber(context, lines, topics=topics, keys=keys)
        async with anyio.create_task_group() as tasks:
            subscriber.add(status.events_endpoint, server_key=server_key)
            tasks.start_soon(subscriber.run)
            while not lines.ended.is_set():
                lines.is_silent = True
                with anyio.move_on_after(SILENCE_S):
                    await lines.ended.wait()
                if lines.ended.is_set() or not lines.is_silent:
                    continue
                # A restarted agent may publish its events at another endpoint.
                before = status.events_endpoint
                status = await _await_status(peer, curve, retries_refusals=True)
                if status.events_endpoint == before:
                    _note(f"no events come from {before}: is that port open, and {TRUSTED}?")
                    continue
                _note(f"the events are at {status.events_endpoint} now, no longer at {before}")
                subscriber.remove(before)
                subscriber.add(status.events_endpoint, server_key=server_key)
            tasks.cancel_scope.cancel()


async def _await_status(
    peer: str, curve: ClientCurve | None, *, retries_refusals: bool = False
) -> AgentStatus:
    request, is_reported = Status(key=curve.keys.public if curve else ""), False
    while True:
        try:
            return await call_agent(peer, request, timeout_s=ANSWER_S, curve=curve)
        except KVBusError as error:
            if not (retries_refusals or isinstance(error, RequestTimeout)):
                raise
            if not is_reported:
                _note(f"no answer from {peer}, retrying: {error.message}")
            is_reported = True
            await anyio.sleep(RETRY_S)


def _note(text: str) -> None:
    sys.stderr.write(f"kvbus status: {printable(text)}\n")
