"""One cluster of a survivor run: a prefill and a decode agent on hosts of their own, their engines.

    prefill engine ── prefill agent ══ veth, UCX over TCP ══ decode agent ── decode engine
                      supervised                             supervised

A supervisor starts an agent again whenever it ends. An engine that ends has lost blocks.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from kvbus.geometry import EngineSpec, GroupSpec, num_blocks_for
from kvbus.protocol import Role
from tests.support.agents import STARTS_WITHIN_S, AgentProcess, Agents, until
from tests.support.engine_program import EngineConfig, EngineProcess, Told
from tests.support.forked import can_fork
from tests.support.keyring import KeyRing
from tests.support.namespaces import BRIDGED, Host
from tests.tools.survivor.draws import BOTH, PREFILL, Event
from tests.tools.survivor.ledger import Ledger, NothingHit

PEER_PORT, EVENTS_PORT = 7701, 7702
CONTROL_PORTS = range(PEER_PORT, EVENTS_PORT + 1)
RATE_MBIT = 100
"""So slow that a READ is in flight most of the time."""
BLOCK_TOKENS, MOST_TOKENS = 16, 512
CAPACITY_TOKENS = 64 * MOST_TOKENS
"""Room for offers that end only by their time to live."""
COMMON: Mapping[str, Any] = {
    "staging_bytes": 16 << 20,
    "slot_bytes": 1 << 20,
    "slice_bytes": 256 << 10,
    "env": {"UCX_TLS": "tcp"},
    "data_interfaces": [BRIDGED],
    "mapped": False,
    "heartbeat_s": 1.0,
    "engine_wait_s": 10.0,
}
CHECK_S = 0.02
ENDS_WITHIN_S, UP_WITHIN_S = 10.0, 120.0
RESETS_WITHIN_S = 1.0
LAST_LINES = 6


@dataclass(frozen=True)
class Shape:
    """The two engines of a cluster: layouts and TP of prefill and decode."""

    layouts: tuple[str, str] = ("NHD", "NHD")
    tp: tuple[int, int] = (1, 1)
    memory: str = "direct"
    has_keys: bool = False

    def config(self, role: str, name: str, attach: str) -> EngineConfig:
        """The configuration of the engine of this role: 4 KiB for each token."""
        at = BOTH.index(role)
        group = GroupSpec("full", (0, 1), BLOCK_TOKENS, 8, 64, "bfloat16")
        return EngineConfig(
            role=role,
            attach=attach,
            spec=EngineSpec(f"{role}-{name}", "m", self.tp[at], (group,)),
            num_blocks={"full": num_blocks_for(CAPACITY_TOKENS, BLOCK_TOKENS)},
            layout=self.layouts[at],
            memory=self.memory if role == PREFILL else "direct",
        )


SHAPES = (
    Shape(),
    Shape(("NHD", "HND"), has_keys=True),
    Shape(tp=(1, 2), memory="staged"),
    Shape(("HND", "HND"), tp=(2, 1), has_keys=True),
)
"""Those of the first clusters; the others begin again."""


class Engine(EngineProcess):
    """An engine of a cluster, started again when it has lost its blocks."""

    def __init__(self, config: EngineConfig, cluster: "Cluster") -> None:
        log = cluster.folder / f"{config.spec.engine_id}.log"
        super().__init__(config, log)
        self._cluster = cluster

    def on_told(self, told: Told) -> None:
        if told["is"] == "violation":
            self._cluster.fail(told["what"], told["of"])
        elif told["is"] == "in_doubt":
            self._cluster.fail("blocks_lost", told["why"])

    def on_end(self) -> None:
        if not self._cluster.is_closed:
            self._cluster.ledger.counts["engines_restarted"] += 1
            self._cluster.spawn(self.start())


class Supervisor:
    """Keeps one agent running; ``is_up`` while it serves."""

    def __init__(self, agent: AgentProcess, cluster: "Cluster") -> None:
        self.agent, self._cluster = agent, cluster
        self.is_up, self._may_start = asyncio.Event(), asyncio.Event()
        self._may_start.set()
        self._is_killed = False

    async def run(self) -> None:
        while True:
            await self._may_start.wait()
            self.agent.launch()
            started = asyncio.create_task(self._note_start())
            assert self.agent.process is not None
            status = await self.agent.process.ended()
            started.cancel()
            self.is_up.clear()
            if not self._is_killed:
                lines = [line[:200] for line in self.agent.lines()[-LAST_LINES:]]
                of = f"the {self.agent.role} agent ended with status {status}"
                self._cluster.fail("agents_died", of, log=lines)
            self._is_killed = False

    async def kill(self) -> None:
        """Kill it once it serves; `start` follows."""
        await self.is_up.wait()
        self._is_killed = True
        self._may_start.clear()
        self.is_up.clear()
        self.agent.kill()

    async def start(self) -> None:
        self._may_start.set()
        await self.is_up.wait()

    def data_pid(self) -> int | None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.agent.pid).children():
                if "kvbus.data" in child.cmdline():
                    return child.pid
        return None

    async def _note_start(self) -> None:
        await until(lambda: self.agent.logged("agent.started"), STARTS_WITHIN_S)
        self.is_up.set()


class Cluster:
    """Both agents and engines, and the events that hit them."""

    def __init__(self, number: int, hosts: Mapping[str, Host], agents: Agents, led: Ledger) -> None:
        """``hosts`` are by role."""
        self.number, self.hosts, self.ledger, self.folder = number, dict(hosts), led, agents.folder
        self.shape = SHAPES[number % len(SHAPES)]
        self.is_closed = False
        self._tasks = set[asyncio.Task[Any]]()
        self._name = f"p{number}.test"
        ring = KeyRing(agents.folder / f"keys-{number}")
        ring.folder.mkdir()
        self._set_names()
        for host in self.hosts.values():
            can_fork(os.environ, host.command)  # starts a fork server and does not wait for it
        self.agents = {role: self._prepare(role, agents, ring) for role in BOTH}
        self.supervisors = {role: Supervisor(agent, self) for role, agent in self.agents.items()}
        self.engines = {
            role: Engine(self.shape.config(role, f"{number}", f"{agent.attach}"), self)
            for role, agent in self.agents.items()
        }

    def _prepare(self, role: str, agents: Agents, ring: KeyRing) -> AgentProcess:
        settings: dict[str, Any] = {
            **COMMON,
            "peer_bind": f"tcp://*:{PEER_PORT}",
            "events_bind": f"tcp://*:{EVENTS_PORT}",
            "http_bind": "",
            "advertise_host": self._name if role == PREFILL else self.hosts[role].address,
        }
        if self.shape.has_keys:
            agent = ring.prepare(agents, Role(role), f"{role}-{self.number}", **settings)
        else:
            agent = agents.prepare(role, insecure=True, **settings)
        agent.runner, agent.forks_in_runner = self.hosts[role].command, True
        agent.started = {"attach": f"{agent.settings['runtime_dir']}/attach.sock"}
        return agent

    def fail(self, what: str, message: str, **more: Any) -> dict[str, Any] | None:
        return self.ledger.fail(what, self.number, message, **more)

    async def history(self, role: str, **of: str) -> list[str]:
        """Return what an agent knows of a fetch or an offer; it may have ended since."""
        agent = self.agents[role]
        agent.started["peer"] = f"tcp://{self.hosts[role].address}:{PEER_PORT}"
        try:
            lines: list[str] = (await asyncio.to_thread(agent.status, **of))["history"]
        except Exception as error:  # the failure counts, with or without its history
            return [f"none: {error!r}"]
        return lines

    def spawn(self, what: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def open(self) -> None:
        """Start everything; return when the engines are registered."""
        self.hosts[PREFILL].set_rate(RATE_MBIT)
        for supervisor in self.supervisors.values():
            self.spawn(supervisor.run())
        async with asyncio.timeout(UP_WITHIN_S):
            for role in BOTH:
                await self.supervisors[role].is_up.wait()
                await self.engines[role].start()
            for engine in self.engines.values():
                await engine.up.wait()

    async def close(self) -> None:
        self.is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self.engines.values():
            await engine.kill()
        for agent in self.agents.values():
            agent.request_end()

    async def cause(self, event: Event) -> None:
        """Cause an event and undo it, or count it as skipped when there is nothing to hit."""
        with self.ledger.causing(self.number, event):
            await getattr(self, f"_{event.kind}")(event)

    async def _reset(self, event: Event) -> None:
        """Reset all TCP connections of the host but those of the control plane."""
        deadline = time.monotonic() + RESETS_WITHIN_S
        while time.monotonic() < deadline:
            reset = self.hosts[event.role].reset_connections
            if number := await asyncio.to_thread(reset, kept_ports=CONTROL_PORTS):
                self.ledger.counts["sockets_reset"] += number
                return
            await asyncio.sleep(CHECK_S)
        raise NothingHit

    async def _kill_data(self, event: Event) -> None:
        await self._signal_data(event, signal.SIGKILL)

    async def _abort_data(self, event: Event) -> None:
        await self._signal_data(event, signal.SIGABRT)

    async def _stop_data(self, event: Event) -> None:
        pid = await self._signal_data(event, signal.SIGSTOP)
        await asyncio.sleep(event.for_s)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def _signal_data(self, event: Event, number: signal.Signals) -> int:
        supervisor = self.supervisors[event.role]
        await supervisor.is_up.wait()
        if (pid := supervisor.data_pid()) is None:
            raise NothingHit
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    async def _kill_agent(self, event: Event) -> None:
        supervisor = self.supervisors[event.role]
        await supervisor.kill()
        await asyncio.sleep(event.for_s)
        await supervisor.start()

    async def _move_agent(self, event: Event) -> None:
        """Kill it, give its host another address, and have its name lead there."""
        supervisor, host = self.supervisors[event.role], self.hosts[event.role]
        await supervisor.kill()
        network, _, last = host.address.rpartition(".")
        other = int(last) + (100 if int(last) < 100 else -100)
        self.hosts[event.role] = await asyncio.to_thread(host.move, f"{network}.{other}")
        self._set_names()
        await asyncio.sleep(event.for_s)
        await supervisor.start()

    async def _cut(self, event: Event) -> None:
        host = self.hosts[event.role]
        await asyncio.to_thread(host.set_cable, "down")
        try:
            await asyncio.sleep(event.for_s)
        finally:
            host.set_cable("up")

    def _set_names(self) -> None:
        for host in self.hosts.values():
            host.set_names({self._name: self.hosts[PREFILL].address})
