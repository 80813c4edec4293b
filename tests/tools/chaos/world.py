"""One world of a chaos run: four agents, the engines, the links between them, and rogues."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from kvbus.protocol import Role
from tests.support.agents import STARTS_WITHIN_S, AgentProcess, Agents, is_abort_by_ucx
from tests.support.engine_program import EngineProcess, Told
from tests.support.keyring import KeyRing
from tests.tools.chaos.draws import Setting
from tests.tools.chaos.ledger import Ledger, Stops
from tests.tools.chaos.links import AGENT_HOST, PROXY_HOST, Link
from tests.tools.chaos.rogue import Rogue
from tests.tools.chaos.shapes import AGENTS, SHAPES, Shape

CHECK_S = 0.05
COMMON = {
    "drain_timeout_s": 3.0,
    "staging_bytes": 8 << 20,
    "slot_bytes": 1 << 20,
    "heartbeat_s": 0.2,
}
PREFILL = {
    "late_read_s": 3.0,
    "max_lease_s": 10.0,
    "max_hold_s": 20.0,
    "max_handoffs": 48,
    "park_bytes": 12 << 20,  # a large offer has up to 10 MB
}
DECODE = {"lease_s": 3.0, "request_timeout_s": 2.0, "max_handoffs": 48, "fetches_at_once": 16}
SMALL_SLICES = {"slice_bytes": 16 << 10}
READY_WITHIN_S = 120.0
ENDS_WITHIN_S = 60.0
LAST_LINES = 8


class Engine(EngineProcess):
    """One engine of a world: killed, stopped, and started again each time that it has ended."""

    def __init__(self, shape: Shape, world: "World", seed: int) -> None:
        attach = world.agents[f"{shape.role}-{shape.agent}"].attach
        super().__init__(shape.config(attach, seed), world.folder / f"{shape.name}.log")
        self.shape, self.stops, self._world = shape, Stops(), world
        self._is_killed = self._is_in_doubt = False

    async def start(self) -> None:
        self._is_killed = self._is_in_doubt = False
        await super().start()

    async def kill(self) -> None:
        self.stops.end()
        self._is_killed = True
        await super().kill()

    def stop(self) -> None:
        self.stops.begin()
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.stops.is_stopped:
            self.signal(signal.SIGCONT)
            self.stops.end()

    def on_told(self, told: Told) -> None:
        if told["is"] == "violation":
            self._world.tell_violation(told)
        elif told["is"] == "in_doubt":
            self._is_in_doubt = True
            self._world.ledger.count("engines_in_doubt")
            self._world.ledger.say(f"in doubt, starts anew: {told['why']}")

    def on_end(self) -> None:
        if self._is_in_doubt and not self._is_killed:
            self._world.start_soon(self.start())
        elif not self._is_killed:
            self._world.tell_violation({"what": "engine_failed", "of": f"{self.shape.name} ended"})


class World:
    """Everything that runs at the same time, until `close`."""

    def __init__(
        self,
        agents: Agents,
        setting: Setting,
        ledger: Ledger,
        seed: int,
        caps: Mapping[str, Any] | None = None,
    ) -> None:
        self.setting, self.ledger, self._agents, self._seed = setting, ledger, agents, seed
        self._caps = caps or {}
        self.folder = agents.folder
        self._tasks: list[asyncio.Task[None]] = []
        self._histories: list[asyncio.Task[None]] = []
        self.stops = {name: Stops() for name in AGENTS}
        self.lag = Stops()
        self.agents: dict[str, AgentProcess] = {}
        self.engines: dict[str, Engine] = {}
        self.used: dict[int, list[Counter[str]]] = {}
        """What each process of an agent had open, calm by calm."""
        self.links: dict[str, Link] = {}
        self.event_links: dict[str, Link] = {}
        self.keys = KeyRing(agents.folder / "keys")
        self.keys.folder.mkdir()

    def agent_of(self, engine: Engine) -> str:
        return f"{engine.shape.role}-{engine.shape.agent}"

    async def open(self) -> None:
        for name in AGENTS:
            self._prepare(name)
        for agent in self.agents.values():
            agent.launch()
        for name in AGENTS:
            await self._has_started(self.agents[name], name)
        for name in ("prefill-0", "prefill-1"):
            await self._open_links(name)
        for number, shape in enumerate(SHAPES):
            engine = self.engines[shape.name] = Engine(shape, self, self._seed + number)
            await engine.start()
        async with asyncio.timeout(READY_WITHIN_S):
            for engine in self.engines.values():
                await engine.up.wait()
        self.start_soon(self._watch_lag())

    async def close(self) -> None:
        await asyncio.gather(*self._histories)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self.engines.values():
            await engine.kill()
        for link in (*self.links.values(), *self.event_links.values()):
            await link.close()
        for agent in self.agents.values():
            agent.request_end()
        for name, agent in self.agents.items():
            await self._end(agent)
            self._read_log(name)
        for log in self.folder.glob("*.log"):
            if "Traceback" in (said := log.read_text()):
                self.ledger.violate("engine_failed", f"{log.stem} has logged {said}")

    def heal(self) -> None:
        for link in (*self.links.values(), *self.event_links.values()):
            link.heal()
        for name in AGENTS:
            self.go_on(name)
        for engine in self.engines.values():
            engine.go_on()

    def stop(self, name: str) -> None:
        self.stops[name].begin()
        self.agents[name].signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        if self.stops[name].is_stopped:
            with suppress(ProcessLookupError, FileNotFoundError):
                self.agents[name].signal(signal.SIGCONT)
            self.stops[name].end()

    def end_data(self, name: str, number: signal.Signals) -> None:
        """End the data process of an agent, if it has one now."""
        with suppress(ProcessLookupError):
            if pid := self.agents[name].data_pid:
                os.kill(pid, number)

    async def restart(self, name: str, *, kill: bool, after_s: float) -> None:
        """End an agent, at once or as its operator would, and start it again."""
        agent = self.agents[name]
        if kill:
            agent.kill()
        else:
            await self._end(agent)
            if (status := agent.exit_status()) != 0:
                said = agent.lines()[-LAST_LINES:]
                self.ledger.violate("bad_end", f"{name} ended with {status}", log=said)
        self._read_log(name)
        await asyncio.sleep(after_s)
        agent.launch()
        await self._has_started(agent, name)

    async def history(self, agent: str, **what: str) -> list[str]:
        try:
            told = await asyncio.to_thread(lambda: self.agents[agent].status(**what))
            history: list[str] = told["history"]
        except Exception as error:  # the violation counts, with or without its history
            return [f"no history: {error!r}"]
        return history

    def rogues(self) -> list[Rogue]:
        rogues = []
        for name, link in self.links.items():
            peer, events = (self.agents[name].settings[key] for key in ("peer_bind", "events_bind"))
            rogues.append(Rogue(peer, events, link, self.ledger, keyed=self.setting.keyed))
        return rogues

    def _prepare(self, name: str) -> None:
        role, number = name.split("-")
        settings: dict[str, Any] = {**COMMON, **self._caps}
        settings |= SMALL_SLICES if self.setting.small_slices else {}
        if role == "prefill":
            settings |= {**PREFILL, "advertise_host": PROXY_HOST}
            settings["park_after_s"] = self.setting.park_after_s
        else:  # the second one never maps, so that NIXL is used in any world
            settings |= {**DECODE, "mapped": self.setting.maps and number == "0"}
            settings["digest"] = self.setting.digest
        if self.setting.fabric == "tcp":
            settings["env"] = {"UCX_TLS": "tcp"}
        if self.setting.keyed:
            self.agents[name] = self.keys.prepare(self._agents, Role(role), name, **settings)
        else:
            self.agents[name] = self._agents.prepare(role, **settings)
        self.agents[name].expected_trouble.add("digest.failed")  # judged by the fetch that fails

    async def _open_links(self, name: str) -> None:
        for links, key in ((self.links, "peer_bind"), (self.event_links, "events_bind")):
            links[name] = Link(int(self.agents[name].settings[key].rpartition(":")[2]))
            await links[name].open()

    async def _has_started(self, agent: AgentProcess, name: str) -> bool:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not agent.logged("agent.started"):
            if not agent.alive or time.monotonic() > deadline:
                self.ledger.violate("not_started", name, log=agent.lines()[-LAST_LINES:])
                return False
            await asyncio.sleep(CHECK_S)
        agent.started = agent.logged("agent.started")[-1]
        agent.started["peer"] = agent.peer.replace(PROXY_HOST, AGENT_HOST)  # asked past its link
        return True

    async def _end(self, agent: AgentProcess) -> None:
        """As its operator would, with patience: many others end at the same time."""
        if agent.process is not None:
            await agent.process.end_async(ENDS_WITHIN_S)

    def _read_log(self, name: str) -> None:
        """An agent has ended: nothing of its log may be an error."""
        for line in self.agents[name].trouble():
            is_killed = line["event"] == "data.ended" and "SIGKILL" in line["reason"]
            if not (is_killed or is_abort_by_ucx(line)):
                self.ledger.violate("agent_trouble", f"{name}: {line}")

    def start_soon(self, what: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(what))

    def tell_violation(self, told: Told) -> None:
        """What an engine has found, with the history of it."""
        self._histories.append(asyncio.create_task(self._violate(told)))

    async def _violate(self, told: Told) -> None:
        more = {}
        if fetch_id := told.get("fetch_id"):
            more["history"] = [
                line for name in AGENTS[2:] for line in await self.history(name, fetch_id=fetch_id)
            ]
        self.ledger.violate(told["what"], told["of"], **more)

    async def _watch_lag(self) -> None:
        """A busy machine takes time from everybody: so much is seen here."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(CHECK_S)
            if time.monotonic() - before > 4 * CHECK_S:
                self.lag.add(before, time.monotonic())
