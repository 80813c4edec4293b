"""The life of an agent process: sockets up, service running, drained and stopped by a signal.

Refuses to know offers or fetches. A second signal ends the drain at once.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.engines.directory import EngineDirectory
from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.memory_return import MemoryReturn
from kvbus.agent.process.access import Access
from kvbus.agent.process.bus_readings import BUS_READINGS, bus_readings
from kvbus.agent.process.config import AgentConfig, advertised
from kvbus.agent.process.connection_bounds import ConnectionBounds
from kvbus.agent.process.data_plane import DataPlane
from kvbus.agent.process.identity import AgentIdentity
from kvbus.agent.process.metrics import AgentMetrics, MetricsPage
from kvbus.agent.process.refusals import Refusals
from kvbus.agent.process.service import Agent, Service
from kvbus.agent.staging.devices import StagingDevices
from kvbus.bus import BusContext, Call, EventPublisher, RequestServer
from kvbus.errors import ErrorCode, KVBusError
from kvbus.memory.attach import AttachConnection, AttachServer
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Register
from kvbus.protocol.peer import AgentStatus, EngineEvent, Status
from kvbus.transport import Transport

log = structlog.get_logger()

AttachHandler = Callable[[AttachConnection, dict[str, Any], list[int]], Awaitable[dict[str, Any]]]
ServiceFactory = Callable[[Agent], Service]
FLUSH_S, MOST_FLUSHES = 0.2, 25


@dataclass(frozen=True, slots=True)
class _Sockets:
    """The ZeroMQ sockets of an agent."""

    engine: RequestServer
    peer: RequestServer
    events: EventPublisher


@dataclass(slots=True)
class Runtime:
    """The parts of one running agent, wired."""

    role: AgentRole
    config: AgentConfig
    boot: str
    transport: Transport
    tasks: TaskGroup
    staging: StagingDevices
    interfaces: tuple[str, ...]
    bus_errors: BusErrors = field(default_factory=BusErrors)
    access: Access = field(default_factory=Access)
    metrics: AgentMetrics = field(default_factory=AgentMetrics)
    draining: bool = False
    _service: Service | None = None
    _agent: Agent | None = None
    _metrics_page: MetricsPage | None = None

    @property
    def service(self) -> Service:
        """The service; only asked after `start`."""
        if self._service is None:
            raise KVBusError("the agent is starting", code=ErrorCode.BUSY)
        return self._service

    @property
    def agent(self) -> Agent:
        """What the service was given; only asked after `start`."""
        if self._agent is None:
            raise KVBusError("the agent is starting", code=ErrorCode.BUSY)
        return self._agent

    @property
    def num_unacknowledged(self) -> int:
        """How many notices no engine has acknowledged yet; only asked after `start`."""
        server = self.agent.engines.server
        return server.num_unacknowledged if server is not None else 0

    async def start(self, context: BusContext, make_service: ServiceFactory) -> None:
        """Bind every socket, then let engines in."""
        engines = EngineDirectory(
            transport=self.transport,
            staging=self.staging,
            memory=MemoryReturn(self.transport, lambda: self.service),
            bus_errors=self.bus_errors,
            max_process_segments=self.config.max_process_segments,
            lend=self.role is AgentRole.PREFILL and self.config.mapped,
            tasks=self.tasks,
            on_ready=self._on_engine_ready,
            on_lost=self._on_engine_lost,
        )
        attach = await self._listen(engines)
        self.access.start(context, self.tasks, lines_s=self.config.max_refusal_lines_s)
        watch = ConnectionBounds(context, self.config)
        sockets = self._bind(context, engines, watch)
        if self.config.metrics_bind:
            self._metrics_page = self.metrics.serve(self.config.metrics_bind)
        self._agent = self._assemble(context, engines, sockets)
        self._service = make_service(self._agent)
        engines.server, engines.identity = sockets.engine, self._agent.identity
        self._take_requests(sockets)
        for owner in (sockets.engine, sockets.peer, sockets.events, watch):
            self.tasks.start_soon(owner.run)
        self.tasks.start_soon(self.metrics.watch_loop_lag)
        self.metrics.add_readings(
            lambda: bus_readings(sockets.engine, sockets.peer, attach, watch.guard), BUS_READINGS
        )
        self.access.guard(sockets.peer, sockets.events, metrics=self.metrics, tasks=self.tasks)
        self.agent.data_plane.check()
        self._log_started()

    async def _listen(self, engines: EngineDirectory) -> AttachServer:
        attach = AttachServer(
            self.config.attach_path,
            self._on_attach_message(engines),
            engines.on_attach_closed,
            max_connections=self.config.max_engine_processes,
            max_process_connections=self.config.max_process_connections,
        )
        await self.tasks.start(attach.serve)
        return attach

    def _bind(
        self, context: BusContext, engines: EngineDirectory, watch: ConnectionBounds
    ) -> _Sockets:
        config = self.config
        engine_endpoint = f"ipc://{config.runtime_path}/engine.sock"
        return _Sockets(
            engine=self._server(context, engine_endpoint, gate=engines.admit),
            peer=self._server(
                context,
                config.peer_bind,
                gate=self.access.gate,
                options=self.access.peer_options(),
                watch=watch.peer_socket(),
            ),
            events=EventPublisher(
                context,
                config.events_bind,
                boot=self.boot,
                heartbeat_s=config.heartbeat_s,
                options=self.access.events_options(),
                watch=watch.events_socket(),
            ),
        )

    def _assemble(self, context: BusContext, engines: EngineDirectory, sockets: _Sockets) -> Agent:
        identity = AgentIdentity(
            agent_id=self.config.agent_id,
            boot=self.boot,
            role=self.role,
            engine_endpoint=sockets.engine.endpoint,
            peer_endpoint=advertised(self.config, sockets.peer.endpoint),
            events_endpoint=advertised(self.config, sockets.events.endpoint),
            server_key=self.access.server_key,
        )
        return Agent(
            identity=identity,
            transport=self.transport,
            engines=engines,
            publisher=sockets.events,
            metrics=self.metrics,
            context=context,
            tasks=self.tasks,
            loop=asyncio.get_running_loop(),
            staging=self.staging,
            data_plane=self._data_plane(sockets),
            access=self.access,
            bus_errors=self.bus_errors,
        )

    def _data_plane(self, sockets: _Sockets) -> DataPlane:
        """The ports that UCX must not have outside of its interfaces; our own are not UCX's."""
        ours = (sockets.peer.endpoint, sockets.events.endpoint)
        ports = {int(endpoint.rpartition(":")[2]) for endpoint in ours}
        if self._metrics_page is not None:
            ports.add(self._metrics_page.port)
        return DataPlane(self.interfaces, frozenset(ports))

    def _log_started(self) -> None:
        log.info(
            "agent.started",
            role=self.role.value,
            attach=str(self.config.attach_path),
            peer=self.agent.identity.peer_endpoint,
            events=self.agent.identity.events_endpoint,
            metrics=self.config.metrics_bind,
            server_key=self.access.server_key,
            data=self.agent.data_plane.endpoints(),
        )

    async def stop_when_told(self, signals: AsyncIterator[signal.Signals]) -> None:
        """Wait for a signal, drain, and end what the drain did not; a second signal ends that."""
        received = await anext(signals)
        log.info("agent.draining", signal=received.name, timeout_s=self.config.drain_timeout_s)
        self.draining = True
        self.service.start_draining()
        async with anyio.create_task_group() as race:
            race.start_soon(self._drain, race)
            await anext(signals)
            race.cancel_scope.cancel()
        left = {name: count for name, count in self.service.counts().items() if count}
        self.service.stop()
        if self._metrics_page is not None:
            await anyio.to_thread.run_sync(self._metrics_page.stop)
        await self._flush()
        log.info("agent.drained", left=left)

    async def _flush(self) -> None:
        """What was just said has to leave the sockets; an engine that lives has heard of it."""
        for _ in range(MOST_FLUSHES):
            await anyio.sleep(FLUSH_S)
            if not self.num_unacknowledged:
                return

    async def _drain(self, race: TaskGroup) -> None:
        with anyio.move_on_after(self.config.drain_timeout_s):
            await self.service.drained()
        race.cancel_scope.cancel()

    def _server(self, context: BusContext, endpoint: str, **options: Any) -> RequestServer:
        refusals = Refusals(self.metrics, lines_s=self.config.max_refusal_lines_s)
        return RequestServer(
            context,
            endpoint,
            boot=self.boot,
            on_fault=self._on_fault,
            on_refusal=refusals.of_call,
            **options,
        )

    def _take_requests(self, sockets: _Sockets) -> None:
        engines = self.agent.engines
        sockets.engine.on(
            {
                Register: self._register,
                AwaitReady: engines.await_ready,
                Detach: engines.detach,
                Status: self._answer_status,
                **self.service.engine_handlers(),
            }
        )
        sockets.peer.on({Status: self._answer_status, **self.service.peer_handlers()})

    def _on_attach_message(self, engines: EngineDirectory) -> AttachHandler:
        refusals = Refusals(self.metrics, lines_s=self.config.max_refusal_lines_s)

        async def answer(
            connection: AttachConnection, message: dict[str, Any], fds: list[int]
        ) -> dict[str, Any]:
            try:
                return await engines.on_attach_message(connection, message, fds)
            except KVBusError as error:
                refusals.note(str(message.get("op")), f"pid {connection.peer.pid}", error)
                raise

        return answer

    def _register(self, wanted: Register, call: Call) -> None:
        if self.draining:
            raise KVBusError("the agent is draining", code=ErrorCode.DRAINING)
        self.agent.engines.register(wanted, call)

    def _answer_status(self, asked: Status, call: Call) -> None:
        engines = self.agent.engines.engines
        call.reply(
            AgentStatus(
                agent_id=self.config.agent_id,
                role=self.role,
                engines={name: engine.ready for name, engine in engines.items()},
                draining=self.draining,
                counts=self.service.counts(),
                data_endpoints=tuple(self.agent.data_plane.endpoints()),
                story=tuple(self.service.story(asked)),
                sharing=self.service.sharing(),
            )
        )

    def _on_engine_ready(self, engine: LocalEngine) -> None:
        self._publish_engine("engine.ready", engine)

    def _on_engine_lost(self, engine: LocalEngine) -> None:
        self._publish_engine("engine.lost", engine)
        self.service.on_engine_lost(engine)

    def _publish_engine(self, op: str, engine: LocalEngine) -> None:
        self.agent.publisher.publish(op, EngineEvent(engine.engine_id, engine.instance))

    def _on_fault(self, error: Exception, call: Call) -> None:
        log.error("request.failed", op=call.op, peer=call.session.boot[:8], exc_info=error)
