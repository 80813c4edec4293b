"""An agent as a simulated process: the product's service, bus and directory of engines, wired."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio

from kvbus.agent.access import Access
from kvbus.agent.copiers import Copiers
from kvbus.agent.data_plane import DataPlane
from kvbus.agent.engines import EngineDirectory
from kvbus.agent.observe import AgentMetrics
from kvbus.agent.service import Agent, Service
from kvbus.agent.slots import StagingDevices
from kvbus.bus import BusContext, Call, EventPublisher, RequestServer, new_boot_id
from kvbus.errors import KVBusError
from kvbus.memory.attach import AttachConnection
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol import (
    PROTOCOL_VERSION,
    AgentRole,
    AwaitReady,
    Detach,
    Register,
    Welcome,
    to_body,
)
from kvbus.transport import Transport
from kvbus_decode.agent import DecodeService
from kvbus_decode.config import DecodeConfig
from kvbus_prefill.agent import PrefillService
from kvbus_prefill.config import PrefillConfig
from tests.sim.network import Network, Process
from tests.sim.transport import Fabric, SimTransport
from tests.sim.world import SimExecutor, World

PEER_PORT, EVENTS_PORT = 7000, 7001


class SimAttach:
    """The attach connection of an engine process: hands over messages and memory, and ends."""

    def __init__(self, agent: "SimAgent", on_hung_up: Callable[[], None]) -> None:
        self.agent, self._on_hung_up = agent, on_hung_up
        self.peer = SimpleNamespace(pid=0)
        self.is_open = True

    def hang_up(self) -> None:
        if self.agent.process.is_alive:
            self.end()
            self.agent.world.after(0.0, self._on_hung_up)

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
        except KVBusError as error:
            reply = error
        self.agent.world.after(0.0, on_reply, reply)


class SimAgent:
    """One process of an agent; `SimAgent.start` makes the next one at the same place."""

    def __init__(
        self,
        world: World,
        network: Network,
        fabric: Fabric,
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
        self.engine_endpoint = f"ipc://{self.name}"
        self.boot = ""
        self.has_started = False
        self.started_at = 0.0
        self._fabric, self._settings = fabric, settings
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

    def stop(self) -> None:
        """As SIGTERM: it drains, and ends."""
        self.process.loop.call_soon(self._stop)

    def _stop(self) -> None:
        self._stopping.set()

    async def _run(self) -> None:
        self.boot, loop = new_boot_id(), self.process.loop
        self._stopping = anyio.Event()
        context = cast("BusContext", self.network.context(self.process))
        transport = cast(
            "Transport", SimTransport(self._fabric, self.process, f"{self.name}/{self.boot}")
        )
        config = self._config()
        staging = await StagingDevices.open(config, transport)
        async with anyio.create_task_group() as self.tasks:
            copiers = Copiers(
                loop,
                num_threads=config.copy_threads,
                new_executor=lambda *_: SimExecutor(loop),
            )
            self.engines = engines = EngineDirectory(
                transport=transport,
                staging=staging,
                copiers=copiers,
                bus_errors=BusErrors(),
                lend=False,
                tasks=self.tasks,
            )
            access = Access()
            engine_socket = self._server(context, self.engine_endpoint, engines.admit)
            peer_socket = self._server(context, self.peer_endpoint, access.gate)
            events = EventPublisher(
                context,
                f"tcp://{self.host}:{EVENTS_PORT}",
                boot=self.boot,
                heartbeat_s=config.heartbeat_s,
            )
            identity = Welcome(
                protocol=PROTOCOL_VERSION,
                agent_id=self.name,
                agent_boot=self.boot,
                role=self.role,
                engine_endpoint=engine_socket.endpoint,
                peer_endpoint=peer_socket.endpoint,
                events_endpoint=events.endpoint,
            )
            self.agent = Agent(
                identity=identity,
                transport=transport,
                engines=engines,
                copiers=copiers,
                publisher=events,
                metrics=AgentMetrics(),
                context=context,
                tasks=self.tasks,
                loop=loop,
                staging=staging,
                data_plane=cast("DataPlane", _OpenPlane()),
                access=access,
                bus_errors=BusErrors(),
                folder=Path(self.name),
            )
            self.service = self._service(config)
            engines.open(identity, server=engine_socket, publisher=events, user=self.service)
            engine_socket.on(
                {
                    Register: engines.register,
                    AwaitReady: engines.await_ready,
                    Detach: engines.detach,
                    **self.service.engine_handlers(),
                }
            )
            peer_socket.on(self.service.peer_handlers())
            await self.service.start()
            for owner in (engine_socket, peer_socket, events):
                self.tasks.start_soon(owner.run)
            self.has_started, self.started_at = True, self.world.now
            await self._stopping.wait()
            self.service.start_draining()
            with anyio.move_on_after(config.drain_timeout_s):
                await self.service.drained()
            self.service.stop()
            await anyio.sleep(0.1)  # last notices
            self.has_started = False
            self.tasks.cancel_scope.cancel()

    def _config(self) -> DecodeConfig | PrefillConfig:
        fixed: dict[str, Any] = {
            "agent_id": self.name,
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

    def _service(self, config: DecodeConfig | PrefillConfig) -> Service:
        if isinstance(config, PrefillConfig):
            return PrefillService(self.agent, config)
        return DecodeService(self.agent, config)

    def _server(
        self, context: BusContext, endpoint: str, gate: Callable[[Call], None]
    ) -> RequestServer:
        return RequestServer(context, endpoint, boot=self.boot, gate=gate, on_fault=self._see_fault)

    def _see_fault(self, error: Exception, call: Call) -> None:
        self.world.fail(f"{self.name}: request '{call.op}' failed inside", error)


class _OpenPlane:
    """The data plane of a simulated machine, at which there is nothing to be checked."""

    endpoints: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()

    async def open(self) -> None:
        """It is."""

    async def end_if_exposed(self) -> None:
        """It is not."""
