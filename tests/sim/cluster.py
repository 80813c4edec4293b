"""Agents and engines of a world, their faults, and the requests that they are given."""

import asyncio
import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import structlog

from kvbus.protocol import AgentRole, Rendezvous, Status
from tests.sim.agent import SimAgent
from tests.sim.engine import DecodeEngine, PrefillEngine, Shape, SimEngine
from tests.sim.handoffs import Handoff, Ledger, Plan
from tests.sim.network import Network
from tests.sim.transport import Fabric
from tests.sim.world import SimLoop, World, seeded

P, D = AgentRole.PREFILL, AgentRole.DECODE
QUIET_S = 900.0
"""So long after the last fault everything must be over."""
CLEAN_S = 120.0
"""So long after that agents may hold something."""


PLAIN = Shape()


class FaultKind(StrEnum):
    """What can go wrong."""

    CRASH_AGENT = "crash_agent"
    FREEZE_AGENT = "freeze_agent"
    DRAIN_AGENT = "drain_agent"
    CRASH_ENGINE = "crash_engine"
    FREEZE_ENGINE = "freeze_engine"
    CUT = "cut"
    BREAK = "break"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong; a cut is between agents ``number`` and ``other``."""

    kind: FaultKind
    at_s: float = 0.0
    role: AgentRole = P
    number: int = 0
    other: int = 0
    lasts_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a world is like."""

    pairs: int = 1
    prefill: Shape = PLAIN
    decode: Shape = PLAIN
    prefill_config: dict[str, Any] = field(default_factory=dict)
    decode_config: dict[str, Any] = field(default_factory=dict)
    delay_s: float = 200e-6
    breaks: float = 0.0
    drops: float = 0.0
    part_s: float = 300e-6
    flips: float = 0.0


class Cluster:
    """A world with its processes: `give` it requests, have it `suffer` faults, and `settle` it.

    Each of these raises `Violation` as soon as something happens that must not.
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        self.world = World(seed)
        self.network = Network(
            self.world, delay_s=settings.delay_s, breaks=settings.breaks, drops=settings.drops
        )
        self.fabric = Fabric(self.network, settings.part_s, settings.flips)
        self.ledger = Ledger(self.world)
        self.ledger.late_s = self._late_s
        self.ledger.story = self._story
        self.ledger.on_offered = self._on_offered
        self.agents: dict[tuple[AgentRole, int], SimAgent] = {}
        self.engines: dict[tuple[AgentRole, int], SimEngine] = {}
        self._boots = 0
        self._pauses: list[tuple[str, float, float]] = []
        self._num_faults = 0
        for number in range(settings.pairs):
            for role in (P, D):
                self._start_agent(role, number)
                self._start_engine(role, number)

    def start(self) -> None:
        """Return once all engines are ready."""
        engines = self.engines
        if not self.world.run(lambda: all(one.is_ready for one in engines.values()), within_s=60):
            self.world.fail("the engines are not ready within a minute")

    def give(self, plan: Plan, after_s: float = 0.0) -> Handoff:
        """A request comes; what becomes of it is in what is returned."""
        handoff = self.ledger.begin(plan)
        self.world.after(after_s, self._begin, handoff)
        return handoff

    def suffer(self, faults: Iterable[Fault]) -> None:
        """These will go wrong."""
        for fault in faults:
            self._num_faults += 1
            self.world.after(fault.at_s, self._begin_fault, fault)

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way, and all is healed."""
        return not (self.ledger.live or self._num_faults)

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.world.now + seconds
        self.world.run(lambda: False, within_s=seconds)
        self.world.now = end

    def until(self, condition: Callable[[], bool], within_s: float = QUIET_S) -> None:
        """Go on until something holds, which it must within so much time."""
        if not self.world.run(condition, within_s=within_s):
            self.world.fail(f"it never held: {condition}")

    def settle(self) -> None:
        """Everything that was begun ends, and nothing is left anywhere."""
        if not self.world.run(lambda: self.is_over, within_s=QUIET_S):
            live = list(self.ledger.live.values())
            self.world.fail(f"{len(live)} handoffs are not over: {live[:3]}")
        if not self.world.run(self._is_clean, within_s=CLEAN_S):
            self.world.fail(f"something is left: {self._left()}")
        for engine in self.engines.values():
            engine.cache.give_back(engine.cache.take(0, len(engine.cache.free)) or ())

    def close(self) -> None:
        """End all processes, and let go of what they had; counts and times stay."""
        processes: list[SimAgent | SimEngine] = [*self.agents.values(), *self.engines.values()]
        for one in processes:
            one.process.loop.is_frozen = False
            one.main.cancel()
        mains = [one.main for one in processes]
        self.world.end(until=lambda: all(main.done() for main in mains), within_s=60)
        self.agents.clear()
        self.engines.clear()
        self.ledger.forget_engines()
        self.fabric.transports.clear()
        self.network.close()
        self.world.close()

    def agent(self, role: AgentRole, number: int = 0) -> SimAgent:
        """The process that is there now."""
        return self.agents[role, number]

    def _is_clean(self) -> bool:
        return not self._left()

    def _left(self) -> list[str]:
        left = []
        for engine in self.engines.values():
            if not engine.is_ready:
                left.append(f"{engine.name} is not ready")
            if len(engine.cache.free) != engine.cache.num_blocks:
                left.append(f"{engine.name} lacks blocks")
        for agent in self.agents.values():
            counts = agent.service.counts() if agent.has_started else {"starting": 1}
            held = {name: count for name, count in counts.items() if count}
            stats = agent.agent.transport.stats() if agent.has_started else None
            if stats is not None and stats.outstanding_reads:
                held["reads"] = stats.outstanding_reads
            if stats is not None and agent.role is P and stats.progress_tokens:
                held["progress"] = stats.progress_tokens
            if held:
                left.append(f"{agent.name} holds {held}")
        return left

    def _story(self, handoff: Handoff) -> str:
        lines = []
        for agent in (self.agents[P, handoff.plan.prefill], self.agents[D, handoff.plan.decode]):
            if agent.has_started:
                asked = Status(offer_id=handoff.offer_id, fetch_id=handoff.name)
                lines += [
                    f"{agent.name} since {agent.started_at:.3f} s:",
                    *agent.service.story(asked),
                ]
        return "\n".join(lines)

    # Requests.

    def _begin(self, handoff: Handoff) -> None:
        plan = handoff.plan
        if plan.meets:
            self._fetch_later(handoff, self._rendezvous(handoff))
        source = self.engines[P, plan.prefill]
        assert isinstance(source, PrefillEngine)
        self._on(source, source.offer, handoff)

    def _on_offered(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        plan = handoff.plan
        if plan.withdraw_after_s is not None:
            self.world.after(plan.withdraw_after_s, self._withdraw, handoff)
        if not plan.meets:
            self._fetch_later(handoff, ticket)

    def _fetch_later(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        after_s = handoff.plan.fetch_after_s
        if after_s is None:
            self.ledger.skip_fetch(handoff)
        else:
            self.world.after(after_s, self._fetch, handoff, ticket)

    def _fetch(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        target = self.engines[D, handoff.plan.decode]
        assert isinstance(target, DecodeEngine)
        self._on(target, target.fetch, handoff, ticket)
        if handoff.plan.cancel_after_s is not None:
            self.world.after(handoff.plan.cancel_after_s, self._on, target, target.cancel, handoff)

    def _withdraw(self, handoff: Handoff) -> None:
        source = self.engines[P, handoff.plan.prefill]
        assert isinstance(source, PrefillEngine)
        self._on(source, source.withdraw, handoff)

    def _on(self, engine: SimEngine, call: Any, *args: Any) -> None:
        """As the engine's own doing; one that has crashed has no agent."""
        engine.process.loop.call_soon(call, *args)

    def _rendezvous(self, handoff: Handoff) -> dict[str, Any]:
        endpoint = self.agents[P, handoff.plan.prefill].peer_endpoint
        return Rendezvous(transfer_id=str(handoff.plan.transfer_id), endpoint=endpoint).to_json()

    # Processes and faults.

    def _start_agent(self, role: AgentRole, number: int) -> None:
        self._boots += 1
        settings = self.settings
        agent = self.agents[role, number] = SimAgent(
            self.world,
            self.network,
            self.fabric,
            role=role,
            number=number,
            boot_number=self._boots,
            settings=settings.prefill_config if role is P else settings.decode_config,
        )
        agent.main.add_done_callback(lambda _: self._bury(agent))

    def _start_engine(self, role: AgentRole, number: int) -> None:
        self._boots += 1
        kind = PrefillEngine if role is P else DecodeEngine
        self.engines[role, number] = kind(
            self.world,
            self.network,
            lambda: self.agents.get((role, number)),
            self.ledger,
            name=f"{role}-engine-{number}",
            boot_number=self._boots,
            machine=self.agents[role, number].host,
            shape=self.settings.prefill if role is P else self.settings.decode,
        )

    def _begin_fault(self, fault: Fault) -> None:
        place = fault.role, fault.number
        agent, engine = self.agents.get(place), self.engines.get(place)
        self.world.after(fault.lasts_s, self._end_fault, fault, agent, engine)
        match fault.kind:
            case FaultKind.CRASH_AGENT if agent is not None:
                self._kill_agent(agent)
            case FaultKind.DRAIN_AGENT if agent is not None and agent.has_started:
                agent.stop()
            case FaultKind.CRASH_ENGINE if engine is not None:
                self._kill_engine(engine)
            case FaultKind.FREEZE_AGENT if agent is not None:
                self._freeze(agent.process.name, agent.process.loop, fault.lasts_s)
            case FaultKind.FREEZE_ENGINE if engine is not None:
                self._freeze(engine.process.name, engine.process.loop, fault.lasts_s)
            case FaultKind.CUT:
                self.network.cut(*self._hosts(fault))
            case FaultKind.BREAK if agent is not None:
                self.network.break_all(agent.host)

    def _end_fault(self, fault: Fault, agent: SimAgent | None, engine: SimEngine | None) -> None:
        role, number = place = fault.role, fault.number
        match fault.kind:
            case FaultKind.CRASH_AGENT if self.agents.get(place) is agent:
                self._start_agent(role, number)
            case FaultKind.DRAIN_AGENT if agent is not None and self.agents.get(place) is agent:
                if not agent.main.done():  # it drains still
                    self.world.after(0.1, self._end_fault, fault, agent, engine)
                    return
                self._start_agent(role, number)
            case FaultKind.CRASH_ENGINE if self.engines.get(place) is engine:
                self._start_engine(role, number)
            case FaultKind.FREEZE_AGENT if agent is not None:
                agent.process.loop.is_frozen = False
            case FaultKind.FREEZE_ENGINE if engine is not None:
                engine.process.loop.is_frozen = False
            case FaultKind.CUT:
                self.network.heal(*self._hosts(fault))
        self._num_faults -= 1

    def _hosts(self, fault: Fault) -> tuple[str, str]:
        return self.agents[P, fault.number].host, self.agents[D, fault.other].host

    def _kill_agent(self, agent: SimAgent) -> None:
        if agent.process.is_alive:
            self._bury(agent)
            agent.process.loop.is_frozen = False
            agent.main.cancel()

    def _bury(self, agent: SimAgent) -> None:
        """The process is gone: nothing that its remains do is seen by anyone."""
        if not agent.process.is_alive:
            return
        self.network.end_process(agent.process)
        for engine in self.engines.values():
            engine.agent_died(agent)

    def _kill_engine(self, engine: SimEngine) -> None:
        if engine.process.is_alive:
            engine.crash()
            self.network.end_process(engine.process)
            engine.process.loop.is_frozen = False
            engine.main.cancel()

    def _freeze(self, name: str, loop: SimLoop, lasts_s: float) -> None:
        loop.is_frozen = True
        self._pauses.append((name, self.world.now, self.world.now + lasts_s))

    def _late_s(self, handoff: Handoff, since: float) -> float:
        """For how long the decode side was frozen since then."""
        number, now = handoff.plan.decode, self.world.now
        names = {self.agents[D, number].name, self.engines[D, number].name}
        return sum(
            max(0.0, min(stop, now) - max(start, since))
            for name, start, stop in self._pauses
            if name in names
        )


class _Errors:
    """Takes the log: an error in it is a violation."""

    world: World | None = None
    has_flips = False

    def __call__(self, _: object, name: str, event: MutableMapping[str, Any]) -> str:
        loop = asyncio.get_running_loop() if asyncio._get_running_loop() is not None else None
        is_dead = isinstance(loop, SimLoop) and loop.is_dead
        flipped = self.has_flips and event["event"] == "digest.failed"
        if self.world is not None and name in ("error", "critical") and not (is_dead or flipped):
            failure = event.pop("exc_info", None)
            self.world.failures.append(f"at {self.world.now:.6f} s: log: {event} {failure!r}")
        raise structlog.DropEvent


ERRORS = _Errors()


@contextmanager
def cluster_of(settings: Settings | None = None, seed: int = 1) -> Iterator[Cluster]:
    """A cluster whose engines are ready; an error in a log of it is a violation."""
    structlog.configure(
        processors=[ERRORS],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    gc.freeze()  # what is there already need not be looked at when this world ends
    with seeded(seed):
        cluster = Cluster(settings or Settings(), seed)
        ERRORS.world, ERRORS.has_flips = cluster.world, cluster.settings.flips > 0
        try:
            cluster.start()
            yield cluster
        finally:
            ERRORS.world = None
            cluster.close()
            structlog.reset_defaults()
            with warnings.catch_warnings():  # the kernel gives back what a killed process had
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
            gc.unfreeze()
