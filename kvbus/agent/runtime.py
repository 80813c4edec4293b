"""The parts of an agent process, wired: sockets up, service running, the place taken.

Refuses to know offers or fetches.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from anyio.abc import TaskGroup

from kvbus.agent.access import Access
from kvbus.agent.agent_sockets import BUS_READINGS, AgentSockets, bus_readings
from kvbus.agent.config import AgentConfig
from kvbus.agent.data_plane import DataPlane
from kvbus.agent.ending import Ending, Signals
from kvbus.agent.engines import EngineDirectory, Surroundings
from kvbus.agent.http import HttpPort, Route
from kvbus.agent.identity import AgentIdentity
from kvbus.agent.observe import AgentMetrics, Refusals
from kvbus.agent.pages import AgentPages, LoopAsker
from kvbus.agent.service import Agent, Service
from kvbus.agent.slots import StagingDevices
from kvbus.agent.status import SelfReport, without_place
from kvbus.bus import BusContext, Call, RequestServer
from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.memory.attach import AttachConnection, AttachServer
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Register
from kvbus.protocol.status import Status
from kvbus.protocol.trace import Trace
from kvbus.transport import Transport

if TYPE_CHECKING:
    from kvbus.agent.otlp import SpanSender

log = structlog.get_logger()

AttachHandler = Callable[[AttachConnection, dict[str, Any], list[int]], Awaitable[dict[str, Any]]]
ServiceFactory = Callable[[Agent], Service]

MAX_ENGINE_PROCESSES = 64
"""Most attach connections of local engines at a time."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What there is once the sockets are bound."""

    agent: Agent
    service: Service
    ending: Ending
    report: SelfReport


@dataclass(slots=True)
class Runtime:
    """The parts of one running agent, wired."""

    role: AgentRole
    config: AgentConfig
    boot: str
    folder: Path
    transport: Transport
    tasks: TaskGroup
    staging: StagingDevices
    interfaces: tuple[str, ...]
    bus_errors: BusErrors = field(default_factory=BusErrors)
    access: Access = field(default_factory=Access)
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
        await self.tasks.start(attach.serve)
        self.access.start(context, self.tasks)
        sockets = AgentSockets.bind(
            context,
            self.config,
            self.boot,
            folder=self.folder,
            access=self.access,
            metrics=self.metrics,
            admit=engines.admit,
        )
        page = HttpPort(self.config, self._routes())
        page.serve()
        agent = self._assemble(context, engines, sockets, page)
        service = make_service(agent)
        engines.open(Surroundings(agent.identity, sockets.engine, sockets.events, service))
        self._parts = self._wire(agent, service, attach, sockets, page)
        self._take_requests(sockets)
        await self.service.start()
        self._run(sockets, attach)
        await agent.data_plane.check()
        self.tasks.start_soon(agent.data_plane.watch)
        self.report.is_started = True
        self._log_started()

    def _engine_directory(self) -> EngineDirectory:
        return EngineDirectory(
            transport=self.transport,
            staging=self.staging,
            bus_errors=self.bus_errors,
            lend=self.role is AgentRole.PREFILL and self.config.mapped,
            tasks=self.tasks,
        )

    def _wire(
        self,
        agent: Agent,
        service: Service,
        attach: AttachServer,
        sockets: AgentSockets,
        page: HttpPort,
    ) -> Parts:
        ending = Ending(service, sockets.engine, page, self.config.drain_timeout_s)
        report = SelfReport(self.config, agent, service, ending)
        return Parts(agent, service, ending, report)

    def _run(self, sockets: AgentSockets, attach: AttachServer) -> None:
        for owner in (sockets.engine, sockets.peer, sockets.events):
            self.tasks.start_soon(owner.run)
        self.tasks.start_soon(self.metrics.watch_loop_lag)
        self.metrics.add_readings(
            lambda: bus_readings(sockets.engine, sockets.peer, attach), BUS_READINGS
        )
        self.access.guard(sockets.peer, sockets.events, metrics=self.metrics, tasks=self.tasks)

    def _routes(self) -> dict[str, Route]:
        return AgentPages(
            LoopAsker(asyncio.get_running_loop()),
            registry=self.metrics.registry,
            ping=self.transport.ping,
            report=lambda: self.report,
        ).routes()

    def _attach_server(self, engines: EngineDirectory) -> AttachServer:
        return AttachServer(
            self.config.attach_path,
            self._on_attach_message(engines),
            engines.on_attach_closed,
            max_connections=MAX_ENGINE_PROCESSES,
        )

    def _assemble(
        self,
        context: BusContext,
        engines: EngineDirectory,
        sockets: AgentSockets,
        page: HttpPort,
    ) -> Agent:
        identity = AgentIdentity(
            agent_id=self.config.agent_id,
            boot=self.boot,
            role=self.role,
            engine_endpoint=sockets.engine.endpoint,
            peer_endpoint=self._advertised(sockets.peer.endpoint),
            events_endpoint=self._advertised(sockets.events.endpoint),
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
            folder=self.folder,
            access=self.access,
            bus_errors=self.bus_errors,
            sender=self._start_sender(identity),
        )

    def _advertised(self, endpoint: str) -> str:
        """The endpoint as others reach it."""
        host = self.config.advertise_host
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}" if host else endpoint

    def _start_sender(self, identity: AgentIdentity) -> "SpanSender | None":
        """What takes spans, if a collector is named. Raises `ConfigError` without kvbus[otel]."""
        if not self.config.otlp_endpoint:
            return None
        try:
            from kvbus.agent import otlp  # noqa: PLC0415  # may not be installed
        except ImportError as error:
            raise ConfigError(
                f"key 'otlp_endpoint': needs a package that is not here ({error.name}): "
                "pip install 'kvbus[otel]'",
                key="otlp_endpoint",
            ) from error
        resource = {
            "service.name": f"kvbus-{identity.role}",
            "service.instance.id": identity.boot,
            "kvbus.agent_id": identity.agent_id,
        }
        sender = otlp.SpanSender(self.config.otlp_endpoint, resource)
        self.tasks.start_soon(sender.run)
        return sender

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
        )

    async def stop_when_told(self, signals: Signals) -> None:
        """Wait until it is to end, drain, and end what the drain did not."""
        await self.parts.ending.run(signals)

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
        refusals = Refusals(self.metrics)

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
