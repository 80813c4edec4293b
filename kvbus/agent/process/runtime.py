"""The parts of an agent process, wired: sockets up, service running, the place taken.

Refuses to know offers or fetches.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from anyio.abc import TaskGroup

from kvbus.agent.engines.directory import EngineDirectory
from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.memory_return import MemoryReturn
from kvbus.agent.http.answer import Route
from kvbus.agent.http.loop_asker import LoopAsker
from kvbus.agent.http.port import HttpPort
from kvbus.agent.http.routes import AgentPages
from kvbus.agent.process.access import Access
from kvbus.agent.process.addresses import advertised
from kvbus.agent.process.agent_sockets import AgentSockets
from kvbus.agent.process.bus_readings import BUS_READINGS, bus_readings
from kvbus.agent.process.config import AgentConfig
from kvbus.agent.process.connection_bounds import ConnectionBounds
from kvbus.agent.process.data_plane import DataPlane
from kvbus.agent.process.ending import Ending, Signals
from kvbus.agent.process.handover import OPS, Answer, Handover
from kvbus.agent.process.identity import AgentIdentity
from kvbus.agent.process.metrics import AgentMetrics
from kvbus.agent.process.refusals import Refusals
from kvbus.agent.process.self_report import SelfReport, without_place
from kvbus.agent.process.service import Agent, Service
from kvbus.agent.process.span_export import start_export
from kvbus.agent.process.takeover import Predecessor, take_over
from kvbus.agent.staging.devices import StagingDevices
from kvbus.bus import BusContext, Call, RequestServer
from kvbus.errors import ErrorCode, KVBusError
from kvbus.memory.attach import AttachConnection, AttachServer
from kvbus.memory.attach.seat import Seat
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Register
from kvbus.protocol.events import EngineEvent
from kvbus.protocol.handover import HandOver
from kvbus.protocol.peer import Status
from kvbus.protocol.trace import Trace
from kvbus.transport import Transport

log = structlog.get_logger()

AttachHandler = Callable[[AttachConnection, dict[str, Any], list[int]], Awaitable[Answer]]
ServiceFactory = Callable[[Agent], Service]
WAIT_FOR_DRAIN = 2
"""An agent has its drain timeout for its engines to go over, and again for what did not."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What there is once the sockets are bound."""

    agent: Agent
    service: Service
    handover: Handover
    ending: Ending
    report: SelfReport


@dataclass(slots=True)
class Runtime:
    """The parts of one running agent, wired; it takes over from another if it ``replaces``."""

    role: AgentRole
    config: AgentConfig
    boot: str
    seat: Seat
    transport: Transport
    tasks: TaskGroup
    staging: StagingDevices
    interfaces: tuple[str, ...]
    bus_errors: BusErrors = field(default_factory=BusErrors)
    access: Access = field(default_factory=Access)
    replaces: bool = False
    metrics: AgentMetrics = field(default_factory=AgentMetrics)
    _parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        """What `start` has made; raises `KVBusError` (``busy``) before."""
        if self._parts is None:
            raise KVBusError("the agent is starting", code=ErrorCode.BUSY)
        return self._parts

    @property
    def service(self) -> Service:
        """The service; only asked after `start`."""
        return self.parts.service

    @property
    def agent(self) -> Agent:
        """What the service was given; only asked after `start`."""
        return self.parts.agent

    @property
    def report(self) -> SelfReport:
        """What it says of itself; only asked after `start`."""
        return self.parts.report

    async def start(self, context: BusContext, make_service: ServiceFactory) -> None:
        """Bind every socket, then let engines in."""
        engines = self._engine_directory()
        attach = self._attach_server(engines)
        if not self.replaces:
            await self.tasks.start(attach.serve)
        self.access.start(context, self.tasks, lines_s=self.config.max_refusal_lines_s)
        watch = ConnectionBounds(context, self.config)
        sockets = AgentSockets.bind(
            context,
            self.config,
            self.boot,
            folder=self.seat.folder,
            access=self.access,
            metrics=self.metrics,
            watch=watch,
            admit=engines.admit,
        )
        page = HttpPort(self.config, self._routes(), self.tasks)
        if not self.replaces:
            page.serve()
        agent = self._assemble(context, engines, sockets, page)
        engines.server, engines.identity = sockets.engine, agent.identity
        self._parts = self._wire(agent, make_service(agent), attach, sockets, page)
        self._take_requests(sockets)
        await self.service.start()
        self._run(sockets, attach, watch)
        await agent.data_plane.check()
        self.tasks.start_soon(agent.data_plane.watch)
        if self.replaces:
            await self._take_over(attach)
            page.serve()
        self.report.is_started = True
        self._log_started()

    def _engine_directory(self) -> EngineDirectory:
        return EngineDirectory(
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

    def _wire(
        self,
        agent: Agent,
        service: Service,
        attach: AttachServer,
        sockets: AgentSockets,
        page: HttpPort,
    ) -> Parts:
        handover = Handover(agent.identity, agent.engines, attach, page)
        ending = Ending(
            service,
            handover,
            page,
            self.config.drain_timeout_s,
            lambda: sockets.engine.num_unacknowledged,
        )
        report = SelfReport(self.config, agent, service, handover, ending)
        return Parts(agent, service, handover, ending, report)

    def _run(self, sockets: AgentSockets, attach: AttachServer, watch: ConnectionBounds) -> None:
        for owner in (sockets.engine, sockets.peer, sockets.events, watch):
            self.tasks.start_soon(owner.run)
        self.tasks.start_soon(self.metrics.watch_loop_lag)
        self.metrics.add_readings(
            lambda: bus_readings(sockets.engine, sockets.peer, attach, watch.guard), BUS_READINGS
        )
        self.access.guard(sockets.peer, sockets.events, metrics=self.metrics, tasks=self.tasks)

    def _routes(self) -> dict[str, Route]:
        return AgentPages(
            LoopAsker(asyncio.get_running_loop()),
            registry=self.metrics.registry,
            ping=self.transport.ping,
            report=lambda: self.report,
        ).routes()

    async def _take_over(self, attach: AttachServer) -> None:
        """Take the place of the agent that runs, or the one that is free."""
        wanted = HandOver(agent_id=self.config.agent_id, role=self.role, agent_boot=self.boot)
        within_s = WAIT_FOR_DRAIN * self.config.drain_timeout_s
        before = await take_over(self.config.attach_path, wanted, within_s=within_s)
        self.report.predecessor = before
        if before is None:
            await self.tasks.start(attach.serve)
            return
        await self.tasks.start(attach.serve, before.place)
        self.tasks.start_soon(self._await_end, before)

    async def _await_end(self, before: Predecessor) -> None:
        handover = self.parts.handover
        handover.refusal = "the agent waits for the end of the one that it replaced"
        await before.watch()
        handover.refusal = ""

    def _attach_server(self, engines: EngineDirectory) -> AttachServer:
        return AttachServer(
            self.config.attach_path,
            self._on_attach_message(engines),
            self._on_attach_closed(engines),
            max_connections=self.config.max_engine_processes,
            max_process_connections=self.config.max_process_connections,
        )

    def _assemble(
        self,
        context: BusContext,
        engines: EngineDirectory,
        sockets: AgentSockets,
        page: HttpPort,
    ) -> Agent:
        host = self.config.advertise_host
        identity = AgentIdentity(
            agent_id=self.config.agent_id,
            boot=self.boot,
            role=self.role,
            engine_endpoint=sockets.engine.endpoint,
            peer_endpoint=advertised(host, sockets.peer.endpoint),
            events_endpoint=advertised(host, sockets.events.endpoint),
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
            data_plane=self._data_plane(sockets, page),
            folder=self.seat.folder,
            access=self.access,
            bus_errors=self.bus_errors,
            outbox=start_export(self.config, identity, self.metrics, self.tasks),
        )

    def _data_plane(self, sockets: AgentSockets, page: HttpPort) -> DataPlane:
        """The ports that UCX must not have outside of its interfaces; our own are not UCX's."""
        return DataPlane(
            self.interfaces, self.transport, lambda: {*sockets.ports, page.number or 0}
        )

    def _log_started(self) -> None:
        log.info(
            "agent.started",
            role=self.role.value,
            attach=str(self.config.attach_path),
            peer=self.agent.identity.peer_endpoint,
            events=self.agent.identity.events_endpoint,
            http=self.config.http_bind,
            server_key=self.access.server_key,
            data=list(self.agent.data_plane.endpoints),
            predecessor=before.boot if (before := self.report.predecessor) is not None else "",
        )

    async def stop_when_told(self, signals: Signals) -> None:
        """Wait until it is to end, drain, and end what the drain did not."""
        await self.parts.ending.wait(signals)
        await self.parts.ending.drain(signals)

    def _take_requests(self, sockets: AgentSockets) -> None:
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
        sockets.peer.on(
            {
                Status: partial(self._answer_peer_status, sockets.peer),
                Trace: self._answer_trace,
                **self.service.peer_handlers(),
            }
        )

    def _on_attach_message(self, engines: EngineDirectory) -> AttachHandler:
        refusals = Refusals(self.metrics, lines_s=self.config.max_refusal_lines_s)

        async def answer(
            connection: AttachConnection, message: dict[str, Any], fds: list[int]
        ) -> Answer:
            try:
                if message.get("op") in OPS:
                    return await self.parts.handover.answer(connection, message)
                return await engines.on_attach_message(connection, message, fds)
            except KVBusError as error:
                refusals.note(str(message.get("op")), f"pid {connection.peer.pid}", error)
                raise

        return answer

    def _on_attach_closed(self, engines: EngineDirectory) -> Callable[[AttachConnection], None]:
        def forget(connection: AttachConnection) -> None:
            engines.on_attach_closed(connection)
            if self._parts is not None:
                self._parts.handover.on_closed(connection)

        return forget

    def _register(self, wanted: Register, call: Call) -> None:
        if self.report.ending.is_draining:
            raise KVBusError("the agent is draining", code=ErrorCode.DRAINING)
        if wanted.role not in (None, self.role):
            raise KVBusError(
                f"this is a {self.role} agent, and the engine is a {wanted.role} engine",
                code=ErrorCode.CONFIG,
                agent=self.role.value,
                engine=str(wanted.role),
            )
        self.agent.engines.register(wanted, call)

    def _answer_status(self, asked: Status, call: Call) -> None:
        call.reply(self.report.status(asked))

    def _answer_peer_status(self, socket: RequestServer, asked: Status, call: Call) -> None:
        told = self.report.status(asked)
        call.reply(told if socket.knows(call) else without_place(told))

    def _answer_trace(self, asked: Trace, call: Call) -> None:
        call.reply(self.report.trace(asked))

    def _on_engine_ready(self, engine: LocalEngine) -> None:
        self._publish_engine("engine.ready", engine)
        self.service.on_engine_ready(engine)

    def _on_engine_lost(self, engine: LocalEngine) -> None:
        self._publish_engine("engine.lost", engine)
        self.service.on_engine_lost(engine)

    def _publish_engine(self, op: str, engine: LocalEngine) -> None:
        self.agent.publisher.publish(op, EngineEvent(engine.engine_id, engine.instance))
