"""Asks agents what they remember of a request, several times, so that their clocks are known."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from kvbus.bus import ClientCurve, KeyPair, agent_client
from kvbus.clocks import ClockOffset, Exchange
from kvbus.errors import KVBusError
from kvbus.protocol.rendezvous import UNKNOWN
from kvbus.protocol.trace import OtherAgent, Trace, Traced
from kvbus.trace.timeline import AgentTrace

NUM_EXCHANGES = 16
"""Questions about the clock: the quickest counts."""


@dataclass(frozen=True, slots=True)
class AgentToAsk:
    """Where an agent is, and its CURVE key, empty when it has none."""

    endpoint: str
    server_key: str = ""


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

    async def ask(self, agents: Sequence[AgentToAsk]) -> Asked:
        """Ask ``agents`` and those that they name; who knows nothing, once more by ids."""
        name = self._name
        known = {one.endpoint: one for one in agents}
        await self._ask_all(agents, Trace(request_id=name, offer_id=name, fetch_id=name))
        named = [one for one in self._named() if one.endpoint not in known]
        known |= {one.endpoint: one for one in named}
        await self._ask_all(named, Trace(request_id=name, offer_id=name, fetch_id=name))
        silent = [known[at] for at, trace in self._traces.items() if not trace.spans]
        if len(silent) < len(self._traces):
            ids = {key: self._id(key) for key in ("request_id", "offer_id", "fetch_id")}
            await self._ask_all(silent, Trace(**ids))
        by_boot = {one.answer.boot: one for one in self._traces.values()}
        return Asked(tuple(by_boot.values()), self._problems)

    async def _ask_all(self, agents: Sequence[AgentToAsk], question: Trace) -> None:
        async with anyio.create_task_group() as tasks:
            for agent in agents:
                tasks.start_soon(self._ask_one, agent, question)

    async def _ask_one(self, agent: AgentToAsk, question: Trace) -> None:
        curve = None
        if self._keys is not None and agent.server_key:
            curve = ClientCurve(self._keys, agent.server_key)
        try:
            self._traces[agent.endpoint] = await self._trace(agent.endpoint, question, curve)
        except KVBusError as error:
            self._problems[agent.endpoint] = error

    async def _trace(self, endpoint: str, question: Trace, curve: ClientCurve | None) -> AgentTrace:
        exchanges: list[Exchange] = []
        outcome: Traced | KVBusError
        async with agent_client(endpoint, curve=curve) as client:
            try:
                outcome = await client.ask(question, timeout_s=self._timeout_s)
                for _ in range(NUM_EXCHANGES):
                    sent_s = time.monotonic()
                    clock = await client.ask(Trace(), timeout_s=self._timeout_s)
                    exchanges.append(Exchange(sent_s, clock.now_s, time.monotonic()))
            except KVBusError as error:
                outcome = error
        if isinstance(outcome, KVBusError):
            raise outcome
        return AgentTrace.of(endpoint, outcome, ClockOffset.of(exchanges))

    def _named(self) -> list[AgentToAsk]:
        others: dict[OtherAgent, None] = {}
        for trace in self._traces.values():
            others |= dict.fromkeys(trace.answer.others)
        return [AgentToAsk(one.endpoint, one.server_key) for one in others]

    def _id(self, key: str) -> str:
        """The last id of this kind that an agent told; not that of all offers that are not met."""
        spans = (span for trace in self._traces.values() for span in trace.spans)
        ids = [str(span.attributes.get(key, UNKNOWN)) for span in spans]
        return next((one for one in reversed(ids) if one != UNKNOWN), "")
