"""An agent as a simulated process: the product's own, but for its threads and sockets."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import anyio
from anyio.abc import TaskStatus

from kvbus.agent.engine_directory import EngineDirectory
from kvbus.agent.runtime import Runtime
from kvbus.agent.service import Service
from kvbus.bus import BusContext, new_boot_id
from kvbus.errors import KVBusError
from kvbus.memory.attach import AttachConnection, PassingAnswer, close_fds
from kvbus.protocol import AgentRole, to_body
from kvbus_decode.config import DecodeConfig
from kvbus_decode.decode_service import DecodeService
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.prefill_service import PrefillService
from tests.sim.data import Machines, SimChild, SimData
from tests.sim.network import Process, SimContext

SLOTS = {"staging_bytes": 16 << 12, "slot_bytes": 1 << 12}
KINDS: dict[AgentRole, tuple[Any, Any]] = {
    AgentRole.PREFILL: (PrefillConfig, PrefillService),
    AgentRole.DECODE: (DecodeConfig, DecodeService),
}


class SimAttach:
    """The attach connection of an engine process."""

    def __init__(self, agent: "SimAgent", on_hung_up: Callable[["SimAttach"], None]) -> None:
        self.agent, self._on_hung_up = agent, on_hung_up
        self.peer = SimpleNamespace(pid=0)
        self.is_open = True

    @property
    def has_hung_up(self) -> bool:
        return not self.is_open

    def shut_down(self) -> None:
        if self.agent.process.is_alive:
            self.end()
            self.agent.world.after(0.0, self._on_hung_up, self)

    def end(self) -> None:
        if self.is_open and self.agent.process.is_alive:
            self.is_open = False
            on_closed = self.agent.engines.on_attach_closed
            self.agent.process.loop.call_soon(on_closed, cast("AttachConnection", self))

    def pass_on(self, message: Any, fds: list[int], on_reply: Callable[[Any], None]) -> None:
        """Send a message; the reply, or the error, comes later."""
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
            if isinstance(reply, PassingAnswer):
                close_fds(reply.fds)  # no lifeline is needed here
        except KVBusError as error:
            reply = error
        self.agent.world.after(0.0, on_reply, reply)


class _NoAttachServer:
    """Stands for the attach server: engines use `SimAttach`."""

    num_refused = num_malformed = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await anyio.sleep_forever()


class _LoopClock:
    """The clock of the process that reads it."""

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
"""Replacements of names, by module. KV is small here, and so are limits."""


class SimAgent:
    """One process of an agent, as `Runtime` wires it."""

    def __init__(
        self, machines: Machines, role: AgentRole, number: int, settings: dict[str, Any]
    ) -> None:
        self.world, self.role = machines.world, role
        host = f"10.{1 if role is AgentRole.PREFILL else 2}.0.{number + 1}"
        self.name = f"{role}-{number}"
        self.process = Process(self.name, host, self.world.new_loop(self.name))
        self.has_data = self.has_started = False
        self.started_at = 0.0
        self._machines, self._settings = machines, settings
        self._stopping: anyio.Event
        self.main = self.process.loop.create_task(self._run())
        self.world.watch(self.main, self.process.loop)

    @property
    def host(self) -> str:
        return self.process.machine

    @property
    def peer_endpoint(self) -> str:
        return f"tcp://{self.host}:7000"

    @property
    def is_up(self) -> bool:
        return self.has_started and self.process.is_alive

    @property
    def child(self) -> SimChild | None:
        """The data process, if one is running."""
        child = self.data.child if self.has_data else None
        return child if child is not None and child.is_alive else None

    @property
    def engines(self) -> EngineDirectory:
        return self.runtime.agent.engines

    @property
    def service(self) -> Service:
        return self.runtime.service

    def stop(self) -> None:
        """As SIGTERM."""
        self.process.loop.call_soon(lambda: self._stopping.set())  # noqa: PLW0108  # made by then

    async def _signals(self) -> AsyncIterator[signal.Signals]:
        await self._stopping.wait()
        yield signal.SIGTERM
        await anyio.sleep_forever()

    async def _run(self) -> None:
        boot, self._stopping = new_boot_id(), anyio.Event()
        new_config, new_service = KINDS[self.role]
        fixed = {"agent_id": self.name, "runtime_dir": f"/{self.name}", "mapped": False}
        fixed |= {"peer_bind": self.peer_endpoint, "events_bind": f"tcp://{self.host}:7001"}
        config = new_config(**{**fixed, **SLOTS, **self._settings})
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
                lambda agent: new_service(agent, config),
                boot=boot,
                context=cast("BusContext", SimContext(self._machines.network, self.process)),
                tasks=self.tasks,
                data=self.data,
                interfaces=(),
            )
            self.has_started, self.started_at = True, self.world.now
            await self.runtime.end(self._signals())
            await anyio.sleep(0.1)  # for the last notices
            self.has_started = False
            await self.data.close()
            self.tasks.cancel_scope.cancel()
