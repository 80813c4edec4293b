"""Agents and engines of a world, their faults, and the requests that they are given."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from itertools import product
from typing import Any
from unittest.mock import patch

import structlog

from kvbus.protocol import AgentRole, Rendezvous, Status
from tests.sim.agent import IN_A_WORLD, SimAgent
from tests.sim.data import Machines, remains_released
from tests.sim.engine import DecodeEngine, PrefillEngine, Shape, SimEngine
from tests.sim.handoffs import Handoff, Ledger, Plan
from tests.sim.memory import MemorySockets
from tests.sim.network import Network, Process
from tests.sim.nixl import Fabric
from tests.sim.world import SimLoop, World, seeded

P, D = AgentRole.PREFILL, AgentRole.DECODE
QUIET_S = 900.0
"""So long after the last fault everything must be over."""
CLEAN_S = 120.0
"""So long after that agents may hold something."""
ORPHAN_S = 1e-3
"""How long a data process outlives its agent's control process."""
PLAIN = Shape()


class FaultKind(StrEnum):
    CRASH_AGENT = "crash_agent"
    FREEZE_AGENT = "freeze_agent"
    """Both of its processes."""
    FREEZE_CONTROL = "freeze_control"
    FREEZE_DATA = "freeze_data"
    CRASH_DATA = "crash_data"
    CRASH_DATA_AGAIN = "crash_data_again"
    """Each data process of an agent crashes soon after its start, or cannot be started."""
    DRAIN_AGENT = "drain_agent"
    CRASH_ENGINE = "crash_engine"
    FREEZE_ENGINE = "freeze_engine"
    LEAVE = "leave"
    """An engine leaves its agent, writes to its blocks, and comes back."""
    CUT = "cut"
    BREAK = "break"
    RESET = "reset"
    """The connections of an agent's NIXL are lost, with all READs that it has posted."""


@dataclass(frozen=True)
class Fault:
    """A cut is between agents ``number`` and ``other``."""

    kind: FaultKind
    _: KW_ONLY
    at_s: float = 0.0
    role: AgentRole = P
    number: int = 0
    other: int = 0
    lasts_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    pairs: int = 1
    prefill: Shape = PLAIN
    decode: Shape = PLAIN
    prefill_config: dict[str, Any] = field(default_factory=dict)
    decode_config: dict[str, Any] = field(default_factory=dict)
    delay_s: float = 200e-6
    breaks: float = 0.0
    drops: float = 0.0
    part_s: float = 300e-6
    thread_s: float = 100e-6
    flips: float = 0.0
    lacks: float = 0.0
    dies: float = 0.0


class Cluster:
    """A world with its processes: `give` it requests, have it `suffer` faults, and `settle` it."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        self.world = World(seed, thread_s=settings.thread_s, lacks=settings.lacks)
        self.sockets = MemorySockets(self.world)
        self.network = Network(
            self.world, delay_s=settings.delay_s, breaks=settings.breaks, drops=settings.drops
        )
        self.fabric = Fabric(network=self.network, part_s=settings.part_s, flips=settings.flips)
        self.machines = Machines(network=self.network, fabric=self.fabric, dies=settings.dies)
        self._num_faults, self._disturbed_at = 0, 0.0
        self.ledger = Ledger(
            self.world,
            late_s=self._late_s,
            quiet_since=self._quiet_since,
            history=self._history,
            on_offered=self._on_offered,
        )
        self.agents: dict[tuple[AgentRole, int], SimAgent] = {}
        self.engines: dict[tuple[AgentRole, int], SimEngine] = {}
        self._processes: list[SimAgent | SimEngine] = []
        """Also those that were killed: their memory is released at the end, with no warning."""
        self._pauses: list[tuple[str, float, float]] = []
        self.faults: Counter[str] = Counter()
        for number, role in product(range(settings.pairs), (P, D)):
            self._start_agent(role, number)
            self._start_engine(role, number)

    def start(self) -> None:
        """Return once all engines are ready."""
        engines = self.engines
        if not self.world.run(lambda: all(one.is_ready for one in engines.values()), within_s=60):
            self.world.fail("the engines are not ready within a minute")

    def give(self, plan: Plan, after_s: float = 0.0) -> Handoff:
        """Begin a request; the handoff shows what becomes of it."""
        handoff = self.ledger.begin(plan)
        self.world.after(after_s, self._begin, handoff)
        return handoff

    def suffer(self, *faults: Fault) -> None:
        for fault in faults:
            self._num_faults += 1
            self.faults[fault.kind.value] += 1
            self.world.after(fault.at_s, self._begin_fault, fault)

    def run(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.world.run(lambda: False, within_s=seconds)
        self.world.now = end

    def until(self, condition: Callable[[], bool], within_s: float = QUIET_S) -> None:
        """Go on until ``condition`` holds, which it must in time."""
        if not self.world.run(condition, within_s=within_s):
            self.world.fail(f"it never held: {condition}")

    def time_until(self, condition: Callable[[], bool]) -> float:
        began = self.world.now
        self.until(condition)
        return self.world.now - began

    def after_events(self, num_events: int) -> None:
        """Go on for so many messages that arrive, ends of threads, and pieces of READs."""
        end = self.world.num_events + num_events
        self.until(lambda: self.world.num_events >= end)

    def end_of(self, handoff: Handoff) -> str:
        """Go on until its fetch has ended; return how, and by which code."""
        self.until(lambda: handoff.is_ended)
        return handoff.end

    def works(self) -> bool:
        """Whether a handoff completes, once all engines are ready."""
        self.start()
        return self.end_of(self.give(Plan())) == "completed"

    def count(self, role: AgentRole, name: str) -> int:
        """A count of the first agent of a role."""
        return int(self.agents[role, 0].service.counts()[name])

    def awaits(self, role: AgentRole, request: str) -> bool:
        """Whether the data process of the role's first agent has such a request to answer."""
        child = self.agents[role, 0].child
        return child is not None and request in child.unanswered.values()

    def num_peers(self) -> int:
        """Peers of NIXL at the first decode agent."""
        child = self.agents[D, 0].child
        return len(child.nixl.peers) if child is not None and child.nixl is not None else 0

    def settle(self) -> None:
        """Go on until everything has ended, and nothing is left anywhere."""
        live = self.ledger.live
        if not self.world.run(lambda: not (live or self._num_faults), within_s=QUIET_S):
            self.world.fail(f"{len(live)} handoffs are not over: {list(live.values())[:3]}")
        if not self.world.run(lambda: not self._left(), within_s=CLEAN_S):
            self.world.fail(f"something is left: {self._left()}")
        for engine in self.engines.values():
            engine.cache.give_back(engine.cache.take(0, len(engine.cache.free)) or ())

    def close(self) -> None:
        """End all processes, and release what they had; counts and times stay."""
        processes: list[SimAgent | SimEngine] = [*self.agents.values(), *self.engines.values()]
        for one in processes:
            one.process.loop.is_frozen = False
            one.main.cancel()
        mains = [one.main for one in processes]
        self.world.end(until=lambda: all(main.done() for main in mains), within_s=60)
        self.agents.clear()
        self.engines.clear()
        self._processes.clear()
        self.fabric.listening.clear()
        self.network.close()
        self.world.close()

    def _left(self) -> list[str]:
        left = []
        for engine in self.engines.values():
            if not engine.is_ready or len(engine.cache.free) != engine.cache.num_blocks:
                left.append(f"{engine.name} is not ready, or lacks blocks")
        for agent in self.agents.values():
            held = {"starting": 1}
            if agent.has_started:
                pooled = sum(one.used_bytes for one in agent.service.pools().values())
                held = {**agent.service.counts(), **_data_counts(agent), "pooled": pooled}
            if any(held.values()):
                left.append(f"{agent.name} holds {held}")
        return left

    def _history(self, handoff: Handoff) -> str:
        lines, asked = [], Status(offer_id=handoff.offer_id, fetch_id=handoff.name)
        for agent in (self.agents[P, handoff.plan.prefill], self.agents[D, handoff.plan.decode]):
            if agent.has_started:
                lines.append(f"{agent.name} since {agent.started_at:.3f} s:")
                lines += agent.service.histories.lines(asked)
        return "\n".join(lines)

    # Requests.

    def park(self, handoff: Handoff) -> None:
        self._on((P, handoff.plan.prefill), PrefillEngine.park, handoff)

    def _begin(self, handoff: Handoff) -> None:
        plan = handoff.plan
        if plan.meets:
            endpoint = self.agents[P, plan.prefill].peer_endpoint
            name = Rendezvous(transfer_id=str(plan.transfer_id), endpoint=endpoint)
            self._fetch_later(handoff, name.to_json())
        self._on((P, plan.prefill), PrefillEngine.offer, handoff)

    def _on_offered(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        plan = handoff.plan
        if plan.withdraw_after_s is not None:
            what = (P, plan.prefill), PrefillEngine.withdraw, handoff
            self.world.after(plan.withdraw_after_s, self._on, *what)
        if plan.park_after_s is not None:
            self.world.after(plan.park_after_s, self.park, handoff)
        if not plan.meets:
            self._fetch_later(handoff, ticket)

    def _fetch_later(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        after_s = handoff.plan.fetch_after_s
        if after_s is None:
            self.ledger.skip_fetch(handoff)
        else:
            self.world.after(after_s, self._fetch, handoff, ticket)
        if handoff.plan.is_held and (after_s is None or after_s > 0):
            self._on((D, handoff.plan.decode), DecodeEngine.hold, handoff, ticket)

    def _fetch(self, handoff: Handoff, ticket: dict[str, Any]) -> None:
        place, after_s = (D, handoff.plan.decode), handoff.plan.cancel_after_s
        self._on(place, DecodeEngine.fetch, handoff, ticket)
        if after_s is not None:
            self.world.after(after_s, self._on, place, DecodeEngine.cancel, handoff)

    def _on(self, place: tuple[AgentRole, int], call: Any, *args: Any) -> None:
        """Call it on the engine's loop."""
        engine = self.engines[place]
        engine.process.loop.call_soon(call, engine, *args)

    # Processes and faults.

    def _start_agent(self, role: AgentRole, number: int) -> None:
        settings = self.settings.prefill_config if role is P else self.settings.decode_config
        agent = self.agents[role, number] = SimAgent(self.machines, role, number, settings)
        agent.main.add_done_callback(lambda _: self._bury(agent))
        self._processes.append(agent)

    def _start_engine(self, role: AgentRole, number: int) -> None:
        kind = PrefillEngine if role is P else DecodeEngine
        self.engines[role, number] = kind(
            self.network,
            self.ledger,
            lambda: self.agents.get((role, number)),
            name=f"{role}-engine-{number}",
            machine=self.agents[role, number].host,
            shape=self.settings.prefill if role is P else self.settings.decode,
        )
        self._processes.append(self.engines[role, number])

    def _begin_fault(self, fault: Fault) -> None:
        place = fault.role, fault.number
        agent, engine = self.agents[place], self.engines[place]
        self.world.after(fault.lasts_s, self._end_fault, fault, agent, engine)
        if fault.kind in (FaultKind.FREEZE_AGENT, FaultKind.FREEZE_CONTROL):
            self._freeze(agent.process, fault.lasts_s)
        child = agent.child
        match fault.kind:
            case FaultKind.CRASH_AGENT:
                self._kill_agent(agent)
            case FaultKind.DRAIN_AGENT:
                agent.stop()
            case FaultKind.CRASH_ENGINE:
                self._kill_engine(engine)
            case FaultKind.FREEZE_ENGINE:
                self._freeze(engine.process, fault.lasts_s)
            case FaultKind.LEAVE:
                engine.leave()
            case FaultKind.CUT:
                self.network.cut(*self._hosts(fault))
            case FaultKind.BREAK:
                self.network.break_all(agent.host)
            case FaultKind.CRASH_DATA:
                _kill_data(agent)
            case FaultKind.CRASH_DATA_AGAIN if agent.has_data:
                self._kill_data_until(agent, self.world.now + fault.lasts_s)
            case FaultKind.FREEZE_DATA | FaultKind.FREEZE_AGENT if child is not None:
                child.freeze()
            case FaultKind.RESET if child is not None and child.nixl is not None:
                child.nixl.reset()

    def _end_fault(self, fault: Fault, agent: SimAgent, engine: SimEngine) -> None:
        place = fault.role, fault.number
        match fault.kind:
            case FaultKind.DRAIN_AGENT if not agent.main.done():
                self.world.after(0.1, self._end_fault, fault, agent, engine)
                return
            case FaultKind.CRASH_AGENT | FaultKind.DRAIN_AGENT if self.agents[place] is agent:
                self._start_agent(*place)
            case FaultKind.CRASH_ENGINE if self.engines[place] is engine:
                self._start_engine(*place)
            case FaultKind.FREEZE_AGENT | FaultKind.FREEZE_CONTROL | FaultKind.FREEZE_DATA:
                agent.process.loop.is_frozen &= fault.kind is FaultKind.FREEZE_DATA
                if fault.kind is not FaultKind.FREEZE_CONTROL and agent.child is not None:
                    agent.child.thaw()
            case FaultKind.FREEZE_ENGINE:
                engine.process.loop.is_frozen = False
            case FaultKind.CUT:
                self.network.heal(*self._hosts(fault))
        self._num_faults -= 1
        self._disturbed_at = self.world.now

    def _hosts(self, fault: Fault) -> tuple[str, str]:
        return self.agents[P, fault.number].host, self.agents[D, fault.other].host

    def _kill_agent(self, agent: SimAgent) -> None:
        if agent.process.is_alive:
            self._bury(agent)
            agent.process.loop.is_frozen = False
            agent.main.cancel()

    def _bury(self, agent: SimAgent) -> None:
        """End the process: nobody sees anything that its remains do."""
        if not agent.process.is_alive:
            return
        self.network.end_process(agent.process)
        self.sockets.end_process(agent.process.loop)
        late_s = self.world.luck.delay_s(ORPHAN_S) if agent.child is not None else 0.0
        self.world.after(late_s, self._bury_data, agent)

    # The kernel kills the data process when its parent has ended, which takes a moment. It holds
    # the lifeline until then, so that engines keep their blocks as they are.
    def _bury_data(self, agent: SimAgent) -> None:
        _kill_data(agent)
        for engine in self.engines.values():
            engine.agent_died(agent)

    def _kill_data_until(self, agent: SimAgent, end: float) -> None:
        agent.data.is_forbidden = self.world.now < end and self.world.luck.chance(0.3)
        if self.world.now < end:
            _kill_data(agent)
            self.world.after(self.world.luck.delay_s(0.1), self._kill_data_until, agent, end)

    def _kill_engine(self, engine: SimEngine) -> None:
        if engine.process.is_alive:
            self.network.end_process(engine.process)
            engine.crash()
            engine.process.loop.is_frozen = False
            engine.main.cancel()

    def _freeze(self, process: Process, lasts_s: float) -> None:
        process.loop.is_frozen = True
        self._pauses.append((process.name, self.world.now, self.world.now + lasts_s))

    def _quiet_since(self) -> float:
        """Since when nothing goes wrong, and both processes of each agent are there."""
        lacks_data = any(agent.child is None for agent in self.agents.values())
        if self._num_faults or lacks_data:
            return math.inf
        return max(self._disturbed_at, self.machines.changed_at)

    def _late_s(self, handoff: Handoff, since: float) -> float:
        number, now = handoff.plan.decode, self.world.now
        names = {self.agents[D, number].name, self.engines[D, number].name}
        return sum(
            max(0.0, min(stop, now) - max(start, since))
            for name, start, stop in self._pauses
            if name in names
        )


def _kill_data(agent: SimAgent) -> None:
    if agent.child is not None:
        agent.child.die("killed by SIGKILL")


def _data_counts(agent: SimAgent) -> dict[str, int]:
    data, child = agent.data, agent.child
    is_asked = child is None or child.unanswered
    progress = data.num_progress if agent.role is P else 0
    return {"jobs": data.num_jobs, "progress": progress, "requests": int(bool(is_asked))}


def _errors(world: World, settings: Settings) -> Callable[..., str]:
    """A processor of the log to which an error is a violation."""
    expected = {"data.ended": 1, "digest.failed": settings.flips, "step.failed": settings.lacks}

    def see(_: object, name: str, event: MutableMapping[str, Any]) -> str:
        loop = asyncio._get_running_loop()
        is_dead = isinstance(loop, SimLoop) and loop.is_dead
        if name in ("error", "critical") and not is_dead and not expected.get(event["event"]):
            failure = event.pop("exc_info", None)
            world.failures.append(f"at {world.now:.6f} s: log: {event} {failure!r}")
        raise structlog.DropEvent

    return see


@contextmanager
def cluster_of(settings: Settings, seed: int = 1) -> Iterator[Cluster]:
    """A cluster whose engines are ready, and which settles at the end."""
    with remains_released(), seeded(seed), ExitStack() as stack:
        cluster = Cluster(settings, seed)
        structlog.configure(
            processors=[_errors(cluster.world, settings)],
            wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
            cache_logger_on_first_use=False,
        )
        stack.callback(structlog.reset_defaults)
        for module, names in {**IN_A_WORLD, **cluster.sockets.names()}.items():
            stack.enter_context(patch.multiple(module, **names))
        stack.callback(cluster.close)
        cluster.start()
        yield cluster
        cluster.settle()
