"""An agent as a simulated process: the product's own, but for its threads and sockets."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import anyio
from anyio.abc import TaskStatus

from kvbus.agent.engine_directory import EngineDirectory
from kvbus.agent.runtime import Runtime
from kvbus.agent.service import Agent, Service
from kvbus.bus import BusContext, new_boot_id
from kvbus.errors import KVBusError
from kvbus.memory.attach import AttachConnection, PassingAnswer, close_fds
from kvbus.protocol import AgentRole, to_body
from kvbus_decode.config import DecodeConfig
from kvbus_decode.decode_service import DecodeService
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.prefill_service import PrefillService
from tests.sim.data import Machines, SimChild, SimData
from tests.sim.network import Network, Process
from tests.sim.world import World

PEER_PORT, EVENTS_PORT = 7000, 7001


class SimAttach:
    """The attach connection of an engine process: hands over messages and memory, and ends."""

    def __init__(self, agent: "SimAgent", on_hung_up: Callable[["SimAttach"], None]) -> None:
        self.agent, self._on_hung_up = agent, on_hung_up
        self.peer = SimpleNamespace(pid=0)
        self.is_open = True

    @property
    def has_hung_up(self) -> bool:
        return not self.is_open

    def hang_up(self) -> None:
        if self.agent.process.is_alive:
            self.end()
            self.agent.world.after(0.0, self._on_hung_up, self)

    def end(self) -> None:
        if self.is_open and self.agent.process.is_alive:
            self.is_open = False
            self.agent.process.loop.call_soon(
                self.agent.engines.on_attach_closed, cast("AttachConnection", self)
            )

    def pass_on(self, message: Any, fds: list[int], on_reply: Callable[[Any], None]) -> None:
        """Hand one message over; the reply, or the error, comes later."""
        self.agent.process.loop.call_soon(self._start, message, fds, on_reply)

    def _start(self, message: Any, fds: list[int], on_reply: Callable[[Any], None]) -> None:
        if self.agent.is_up:
            self.agent.tasks.start_soon(self._answer, message, fds, on_reply)

    async def _answer(self, message: Any, fds: list[int], on_reply: Callable[[Any], None]) -> None:
        connection = cast("AttachConnection", self)
        asked = {"op": message.op, "body": to_body(message)}
        reply: Any
        try:
            reply = await self.agent.engines.on_attach_message(connection, asked, fds)
            if isinstance(reply, PassingAnswer):  # the end of an agent is seen without a lifeline
                close_fds(reply.fds)
        except KVBusError as error:
            reply = error
        self.agent.world.after(0.0, on_reply, reply)


class _NoAttachServer:
    """Stands for the attach server: engines come by `SimAttach`."""

    num_refused = num_malformed = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Where it would be, and whom it would tell."""

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await anyio.sleep_forever()


class _LoopClock:
    """The clock of the process that looks at it."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()


IN_A_WORLD: dict[str, dict[str, Any]] = {
    "kvbus.agent.runtime": {"AttachServer": _NoAttachServer},
    "kvbus.data.server": {"listening_sockets": tuple},
    "kvbus.data.jobs": {"SHORT_COPY_BYTES": 64, "MAX_INLINE_RUNS": 8},
    "kvbus.data.copiers": {"LEAST_PART_BYTES": 64},
    "kvbus.bus.pump": {"perf_counter": _LoopClock.monotonic},
    "kvbus.engine.offers": {"time": _LoopClock},
    "kvbus.engine.retrying": {"time": _LoopClock},
}
"""What a module has by these names in a simulated process. KV is small here, and so is the rest."""


class SimAgent:
    """One process of an agent, as `Runtime` wires it; who starts it again makes another."""

    def __init__(
        self,
        world: World,
        network: Network,
        machines: Machines,
        *,
        role: AgentRole,
        number: int,
        boot_number: int,
        settings: dict[str, Any],
    ) -> None:
        self.world, self.network, self.role, self.number = world, network, role, number
        host = f"10.{1 if role is AgentRole.PREFILL else 2}.0.{number + 1}"
        self.name = f"{role}-{number}"
        self.process = Process(self.name, host, world.new_loop(f"{self.name}/{boot_number}"))
        self.boot = ""
        self.has_data = self.has_started = False
        self.started_at = 0.0
        self._machines, self._settings = machines, settings
        self._stopping: anyio.Event
        self.main = self.process.loop.create_task(self._run())
        world.watch(self.main, self.process.loop)

    @property
    def host(self) -> str:
        return self.process.machine

    @property
    def peer_endpoint(self) -> str:
        return f"tcp://{self.host}:{PEER_PORT}"

    @property
    def is_up(self) -> bool:
        return self.has_started and self.process.is_alive

    @property
    def child(self) -> SimChild | None:
        """Its data process, if one is running."""
        child = self.data.child if self.has_data else None
        return child if child is not None and child.is_alive else None

    @property
    def engines(self) -> EngineDirectory:
        return self.runtime.agent.engines

    @property
    def service(self) -> Service:
        return self.runtime.service

    def stop(self) -> None:
        """As SIGTERM: it drains, and ends."""
        self.process.loop.call_soon(self._stop)

    def _stop(self) -> None:
        self._stopping.set()

    async def _signals(self) -> AsyncIterator[signal.Signals]:
        await self._stopping.wait()
        yield signal.SIGTERM
        await anyio.sleep_forever()

    async def _run(self) -> None:
        self.boot, self._stopping = new_boot_id(), anyio.Event()
        config = self._config()
        self.data = SimData(
            self._machines,
            self.process,
            new_boot=new_boot_id,
            name=config.agent_id,
            slice_bytes=config.slice_bytes,
            copy_threads=config.copy_threads,
        )
        self.has_data = True
        async with anyio.create_task_group() as self.tasks:
            self.runtime = await Runtime.start(
                self.role,
                config,
                partial(_service, config),
                boot=self.boot,
                context=cast("BusContext", self.network.context(self.process)),
                tasks=self.tasks,
                data=self.data,
                interfaces=(),
            )
            self.has_started, self.started_at = True, self.world.now
            await self.runtime.end(self._signals())
            await anyio.sleep(0.1)  # last notices
            self.has_started = False
            await self.data.close()
            self.tasks.cancel_scope.cancel()

    def _config(self) -> DecodeConfig | PrefillConfig:
        fixed: dict[str, Any] = {
            "agent_id": self.name,
            "runtime_dir": f"/{self.name}",
            "peer_bind": self.peer_endpoint,
            "events_bind": f"tcp://{self.host}:{EVENTS_PORT}",
            "mapped": False,
            "staging_bytes": 16 << 12,
            "slot_bytes": 1 << 12,
            **self._settings,
        }
        if self.role is AgentRole.PREFILL:
            return PrefillConfig(**fixed)
        return DecodeConfig(**fixed)


def _service(config: DecodeConfig | PrefillConfig, agent: Agent) -> Service:
    if isinstance(config, PrefillConfig):
        return PrefillService(agent, config)
    return DecodeService(agent, config)
