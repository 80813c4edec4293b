"""The command ``kvbus trace``: one request over all agents, and where its time went."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import anyio
import typer
from msgspec import to_builtins
from rich.text import Text

from kvbus.bus import ClientCurve, KeyPair, RequestClient, agent_client
from kvbus.clocks import ClockOffset, Exchange
from kvbus.console import Console
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.asker import KeyFile, ServerKeys, curves_of
from kvbus.output import fail, write_json
from kvbus.protocol.ticket import UNKNOWN
from kvbus.protocol.trace import OtherAgent, Trace
from kvbus.text import printable
from kvbus.trace.timeline import AgentTrace, Timeline, end_of, failure_of
from kvbus.trace.waterfall import draw_waterfall, reasons

NUM_EXCHANGES = 16
"""Questions about the clock: the quickest counts."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of all questions; ``problems`` are by endpoint.

    An agent that was asked at two of its addresses has one trace.
    """

    traces: tuple[AgentTrace, ...]
    problems: dict[str, KVBusError]


class Questions:
    """What is asked for one ``name``: of a request, an offer or a fetch."""

    def __init__(self, name: str, *, keys: KeyPair | None, timeout_s: float) -> None:
        self._name, self._keys, self._timeout_s = name, keys, timeout_s
        self._traces: dict[str, AgentTrace] = {}
        self._problems: dict[str, KVBusError] = {}

    async def ask(self, agents: Sequence[OtherAgent]) -> Asked:
        """Ask ``agents`` and those that they name; who knows nothing, once more by ids."""
        name = self._name
        known = {one.endpoint: one for one in agents}
        await self._ask_all(agents, Trace(request_id=name, offer_id=name, fetch_id=name))
        others = [one for trace in self._traces.values() for one in trace.answer.others]
        named = [one for one in dict.fromkeys(others) if one.endpoint not in known]
        known |= {one.endpoint: one for one in named}
        await self._ask_all(named, Trace(request_id=name, offer_id=name, fetch_id=name))
        silent = [known[at] for at, trace in self._traces.items() if not trace.spans]
        if len(silent) < len(self._traces):
            ids = {key: self._id(key) for key in ("request_id", "offer_id", "fetch_id")}
            await self._ask_all(silent, Trace(**ids))
        by_boot = {one.answer.boot: one for one in self._traces.values()}
        return Asked(tuple(by_boot.values()), self._problems)

    async def _ask_all(self, agents: Sequence[OtherAgent], question: Trace) -> None:
        async with anyio.create_task_group() as tasks:
            for agent in agents:
                tasks.start_soon(self._ask_one, agent, question)

    async def _ask_one(self, agent: OtherAgent, question: Trace) -> None:
        at, curve = agent.endpoint, None
        if self._keys is not None and agent.server_key:
            curve = ClientCurve(self._keys, agent.server_key)
        try:
            async with agent_client(at, curve=curve) as client:
                await self._trace(client, at, question)
        except KVBusError as error:
            self._problems[at] = error

    async def _trace(self, client: RequestClient, at: str, question: Trace) -> None:
        exchanges: list[Exchange] = []
        try:
            answer = await client.ask(question, timeout_s=self._timeout_s)
            for _ in range(NUM_EXCHANGES):
                sent_s = time.monotonic()
                clock = await client.ask(Trace(), timeout_s=self._timeout_s)
                exchanges.append(Exchange(sent_s, clock.now_s, time.monotonic()))
        except KVBusError as error:
            self._problems[at] = error
        else:
            self._traces[at] = AgentTrace.of(at, answer, ClockOffset.of(exchanges))

    def _id(self, key: str) -> str:
        """The last id of this kind that an agent told; not that of all offers that are not met."""
        spans = (span for trace in self._traces.values() for span in trace.spans)
        ids = [str(span.attributes.get(key, UNKNOWN)) for span in spans]
        return next((one for one in reversed(ids) if one != UNKNOWN), "")


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
        agents = [OtherAgent(at, key) for at, key in zip(peer, server_keys, strict=True)]
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
    if as_one_json:
        write_json(_as_map(request_id, timeline, asked))
        return
    _draw(timeline, Console())


def _draw(timeline: Timeline, console: Console) -> None:
    """The last line says how the fetch failed, or where the time went."""
    console.print(draw_waterfall(timeline, width=console.width))
    failed = failure_of(timeline)
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


def _as_map(request_id: str, timeline: Timeline, asked: Asked) -> dict[str, object]:
    """Times in seconds from the start of the timeline."""
    return {
        "id": request_id,
        "total_s": timeline.total_s,
        "verdict": failure_of(timeline) or timeline.verdict(),
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
                    to_builtins(span)
                    | {
                        "start_s": span.start_s - timeline.start_s,
                        "end_s": end_of(span) - timeline.start_s,
                    }
                    for span in one.spans
                ],
            }
            for one in timeline.agents
        ],
        "problems": {at: error.message for at, error in asked.problems.items()},
    }
