"""The command ``kvbus trace``."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated

import anyio
import typer
from msgspec import to_builtins
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvbus.bus import ClientCurve, KeyPair, agent_client
from kvbus.clocks import ClockOffset, Exchange
from kvbus.console import Console
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.client_options import KeyFile, ServerKeys, curves_of
from kvbus.output import can_write, waiting_for, write_json
from kvbus.protocol.ticket import UNKNOWN
from kvbus.protocol.tools import OtherAgent, Span, Trace
from kvbus.text import printable
from kvbus.trace.timeline import AgentTrace, Timeline, covered_s, end_of, failure_of

NUM_EXCHANGES = 16
"""Clock queries; the fastest counts."""
BAR, MIN_BAR = "█", 16
SPACE = 11
MOST_ALIKE = 3
"""More adjacent spans of one name share a line."""
STYLES = {"prefill": "cyan", "decode": "green"}


@dataclass(slots=True)
class TraceQuery:
    name: str
    keys: KeyPair | None
    timeout_s: float
    traces: dict[str, AgentTrace] = field(default_factory=dict)
    problems: dict[str, KVBusError] = field(default_factory=dict)

    async def request(self, agents: Sequence[OtherAgent]) -> None:
        """Query also agents that others name, and those without spans again, by ids."""
        by_name = Trace(request_id=self.name, offer_id=self.name, fetch_id=self.name)
        agent_at = {one.endpoint: one for one in agents}
        await self._query_all(agents, by_name)
        others = [one for trace in self.traces.values() for one in trace.answer.agents]
        named = [one for one in dict.fromkeys(others) if one.endpoint not in agent_at]
        agent_at |= {one.endpoint: one for one in named}
        await self._query_all(named, by_name)
        without_spans = [agent_at[at] for at, trace in self.traces.items() if not trace.spans]
        if len(without_spans) < len(self.traces):  # the others give the ids
            ids = {key: self._id(key) for key in ("request_id", "offer_id", "fetch_id")}
            await self._query_all(without_spans, Trace(**ids))

    @property
    def answered(self) -> list[AgentTrace]:
        """One trace per agent, even if it has two addresses."""
        return list({one.answer.boot: one for one in self.traces.values()}.values())

    async def _query_all(self, agents: Sequence[OtherAgent], request: Trace) -> None:
        async with anyio.create_task_group() as tasks:
            for agent in agents:
                tasks.start_soon(self._query_one, agent, request)

    async def _query_one(self, agent: OtherAgent, request: Trace) -> None:
        at, curve = agent.endpoint, None
        if self.keys is not None and agent.server_key:
            curve = ClientCurve(self.keys, agent.server_key)
        exchanges: list[Exchange] = []
        try:
            async with agent_client(at, curve=curve) as client:
                answer = await client.request(request, timeout_s=self.timeout_s)
                for _ in range(NUM_EXCHANGES):
                    sent_s = time.monotonic()
                    clock = await client.request(Trace(), timeout_s=self.timeout_s)
                    exchanges.append(Exchange(sent_s, clock.now_s, time.monotonic()))
        except KVBusError as error:
            self.problems[at] = error
        else:
            self.traces[at] = AgentTrace.of(at, answer, ClockOffset.of(exchanges))

    def _id(self, key: str) -> str:
        spans = (span for trace in self.traces.values() for span in trace.spans)
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
            "decode agent names the prefill agent, which is queried as well.",
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
    keys, server_keys = curves_of(key_file, server_key or [], len(peer))
    agents = [OtherAgent(at, key) for at, key in zip(peer, server_keys, strict=True)]
    query = TraceQuery(request_id, keys, timeout)
    with waiting_for(f"{' and '.join(peer)} to answer"):
        anyio.run(query.request, agents)
    for endpoint, problem in query.problems.items():
        if isinstance(problem, ConfigError):
            raise problem
        warning = f"warning: {endpoint}: {problem.code}: {problem.message}"
        typer.echo(printable(warning), err=True)
    timeline = Timeline.of(query.answered, now_s=time.monotonic())
    if not timeline.agents:
        raise KVBusError(_unknown(query))
    if as_one_json:
        write_json(_as_map(timeline, query))
        return
    _draw(timeline, Console())


def _draw(timeline: Timeline, console: Console) -> None:
    console.print(draw_waterfall(timeline, width=console.width))
    failed = failure_of(timeline)
    for error, label in reasons(timeline).items():
        if not failed.endswith(error):
            console.print(Text(f"{label}: {error}", style="red"), soft_wrap=True)
    console.print(f"\n{timeline.verdict()}", soft_wrap=True)
    if failed:
        console.print(Text(failed, style="red"), soft_wrap=True)


def _unknown(query: TraceQuery) -> str:
    if not query.traces:
        return (
            "no agent answered, so nothing is known; see that --peer is the peer address of one, "
            "and what kvbus doctor --only peer --peer reports of the connection"
        )
    names = ", ".join(one.answer.agent_id for one in query.answered)
    return (
        f"no agent remembers '{query.name}': queried {names}. Agents forget the oldest of what "
        "has ended (max_ended_bytes), and all of it when they end"
    )


def _as_map(timeline: Timeline, query: TraceQuery) -> dict[str, object]:
    """Times are in seconds from the start of the timeline."""
    return {
        "id": query.name,
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
        "problems": {at: error.message for at, error in query.problems.items()},
    }


@dataclass(frozen=True, slots=True)
class Line:
    spans: Sequence[Span]
    label: str

    @property
    def error(self) -> str:
        return next((span.error for span in reversed(self.spans) if span.error), "")


def draw_waterfall(timeline: Timeline, *, width: int) -> Table:
    lines = [(agent, list(_lines(agent.spans))) for agent in timeline.agents]
    labels = [line.label for _, some in lines for line in some]
    widest = max(map(len, (*labels, *map(_heading, timeline.agents))), default=0)
    longest = len(_ms(timeline.total_s))
    num_columns = max(MIN_BAR, width - widest - 2 * longest - SPACE)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("span", overflow="fold")
    table.add_column("from", justify="right", no_wrap=True, min_width=longest)
    table.add_column("ms", justify="right", no_wrap=True, min_width=longest)
    table.add_column("", no_wrap=True)
    for agent, some in lines:
        table.add_row(Text(_heading(agent), style="bold"))
        style = STYLES[agent.answer.role]
        for line in some:
            bar = Text(
                _bar(line.spans, timeline, num_columns), style="red" if line.error else style
            )
            began_s = line.spans[0].start_s - timeline.start_s
            table.add_row(Text(line.label), _ms(began_s), _ms(covered_s(line.spans)), bar)
    return table


def reasons(timeline: Timeline) -> dict[str, str]:
    """Map the end of a span to the label of the innermost line that ended there."""
    lines = (line for agent in timeline.agents for line in _lines(agent.spans))
    return {line.error: line.label.strip() for line in lines if line.error}


def _heading(agent: AgentTrace) -> str:
    answer, error_ms = agent.answer, agent.clock.error_s * 1e3
    cut = ", older ones left out" if answer.cut else ""
    return f"{answer.role} {answer.agent_id}  +/- {error_ms:.3f} ms{cut}"


def _lines(spans: Sequence[Span]) -> Iterator[Line]:
    for depth, run in groupby(spans, key=lambda span: span.depth):
        family, indent = list(run), "  " * depth
        names = dict.fromkeys(span.name for span in family)
        alike = {name: [span for span in family if span.name == name] for name in names}
        if max(map(len, alike.values())) <= MOST_ALIKE:
            yield from (Line([one], f"{indent}{one.name} {one.about}".rstrip()) for one in family)
        else:
            for name, some in alike.items():
                count = f" x {len(some)}" if len(some) > 1 else ""
                yield Line(some, f"{indent}{name}{count}")


def _bar(spans: Sequence[Span], timeline: Timeline, num_columns: int) -> str:
    scale = num_columns / timeline.total_s if timeline.total_s else 0.0
    cells = [" "] * num_columns
    for span in spans:
        first = min(int((span.start_s - timeline.start_s) * scale), num_columns - 1)
        last = max(first + 1, round((end_of(span) - timeline.start_s) * scale))
        bar = BAR if can_write(BAR) else "#"
        cells[first:last] = bar * (min(last, num_columns) - first)
    return "".join(cells[:num_columns]).rstrip()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
