"""An agent process, from start to end."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import structs

from kvbus.agent.access import EVENTS, PEER, Access, load_http_token
from kvbus.agent.config import AgentConfig, named
from kvbus.agent.data_plane import (
    DataPlane,
    choose_interfaces,
    has_rdma,
    is_one_machine,
    nixl_environment,
)
from kvbus.agent.engine_directory import EngineDirectory, Reception
from kvbus.agent.http import AgentPages, HttpServer
from kvbus.agent.observe import AgentMetrics, Refusals
from kvbus.agent.probe import measure_vram_read
from kvbus.agent.processes import READINGS as PROCESS_READINGS
from kvbus.agent.processes import ProcessReport
from kvbus.agent.service import Agent, Service
from kvbus.agent.staging_devices import StagingDevices
from kvbus.agent.status import StatusReporter, without_place
from kvbus.agent.supervisor import Supervisor
from kvbus.bus import (
    BusContext,
    Call,
    EventPublisher,
    RequestServer,
    new_boot_id,
    new_context,
)
from kvbus.data.child import spawner
from kvbus.data.client import DataProcess
from kvbus.data.messages import UCX_ONLY, Cut, Log
from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.memory.attach import ENGINE_SOCKET, AttachServer, Lifeline
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import Welcome
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Leaving, Register
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.tools import AgentStatus, Live, Status, Trace
from kvbus.threads import settle_interpreter

if TYPE_CHECKING:
    from kvbus.agent.otlp import SpanSender

log = structlog.get_logger()

ServiceFactory = Callable[[Agent], Service]
Signals = AsyncIterator[signal.Signals]

MOST_FILES = 1 << 16
MAX_ENGINE_PROCESSES = 64
BUS_READINGS = {
    "malformed_messages": "Frames that were no message.",
    "bus_busy": "Requests refused because too many were pending.",
    "bus_repeats": "Requests that arrived again while they were in progress.",
    "peer_pings": "Pings from other agents.",
    "replies_dropped": "Messages to peers that were gone or did not read.",
    "attach_refused": "Rejected connections to the attach socket.",
}
DATA_READINGS = {**PROCESS_READINGS, "registered_bytes": "Memory registered with NIXL."}


async def run_agent(
    role: AgentRole, config: AgentConfig, boot: str, make_service: ServiceFactory
) -> None:
    """Raise `KVBusError` if it cannot start."""
    lifeline = Lifeline()  # must be first, see Lifeline
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_failure)
    access = Access.open(config)
    interfaces = choose_interfaces(config)
    os.environ.update(nixl_environment(interfaces, config.data_ports))
    _allow_files()
    data = DataProcess(
        spawner(loop, held_fds=(lifeline.write_fd,)),
        new_boot=new_boot_id,
        name=config.agent_id,
        slice_bytes=config.slice_bytes,
        copy_threads=config.copy_threads,
        backends=config.backends,
    )
    try:
        with (
            anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
            new_context() as context,
        ):
            async with anyio.create_task_group() as tasks:
                bus_errors = BusErrors()
                bus_errors.install()  # stays until the process ends
                runtime = await Runtime.start(
                    role,
                    config,
                    make_service,
                    boot=boot,
                    context=context,
                    tasks=tasks,
                    data=data,
                    interfaces=interfaces,
                    access=access,
                    lifeline=lifeline,
                    bus_errors=bus_errors,
                )
                settle_interpreter()
                await runtime.end(signals)
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await data.close()
        log.info("agent.stopped")


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


def _log_loop_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    log.error("loop.failed", reason=context["message"], exc_info=context.get("exception"))


def _log_request_failure(error: Exception, call: Call) -> None:
    log.error("request.failed", op=call.op, peer=call.session.boot[:8], exc_info=error)


class Sockets(NamedTuple):
    engines: RequestServer
    peers: RequestServer
    publisher: EventPublisher

    @classmethod
    def bind(
        cls,
        config: AgentConfig,
        boot: str,
        *,
        context: BusContext,
        access: Access,
        metrics: AgentMetrics,
    ) -> "Sockets":
        server = partial(RequestServer, context, boot=boot, on_fault=_log_request_failure)
        engines = server(
            f"ipc://{config.runtime_path / ENGINE_SOCKET}", on_refusal=Refusals(metrics).of_call
        )
        with named("peer_bind"):
            peers = server(
                config.peer_bind,
                options=access.options(PEER),
                on_refusal=Refusals(metrics).of_call,
            )
        with named("events_bind"):
            publisher = EventPublisher(
                context,
                config.events_bind,
                boot=boot,
                heartbeat_s=config.heartbeat_s,
                options=access.options(EVENTS),
            )
        return cls(engines, peers, publisher)


@dataclass(frozen=True, slots=True)
class Runtime:
    config: AgentConfig
    agent: Agent
    sockets: Sockets
    service: Service
    report: StatusReporter
    supervisor: Supervisor = field(default_factory=Supervisor.of_environment)

    @classmethod
    async def start(
        cls,
        role: AgentRole,
        config: AgentConfig,
        make_service: ServiceFactory,
        *,
        boot: str,
        context: BusContext,
        tasks: TaskGroup,
        data: DataProcess,
        interfaces: tuple[str, ...],
        access: Access | None = None,
        lifeline: Lifeline | None = None,
        bus_errors: BusErrors | None = None,
    ) -> "Runtime":
        loop, metrics, reception = asyncio.get_running_loop(), AgentMetrics(), Reception()
        access, bus_errors = access or Access(), bus_errors or BusErrors()
        attach = _attach_server(config, reception, metrics)
        await tasks.start(attach.serve)  # first: its lock covers the engine socket
        access.start(context, tasks, metrics)
        sockets = Sockets.bind(config, boot, context=context, access=access, metrics=metrics)
        identity = _identity(role, config, sockets, access.server_key)
        staging = _staging(config, data, interfaces)
        engines = EngineDirectory(
            data=data,
            staging=staging,
            bus_errors=bus_errors,
            lifeline=lifeline or Lifeline(),
            tasks=tasks,
            identity=identity,
            server=sockets.engines,
            publisher=sockets.publisher,
            is_young=partial(_is_before, loop, loop.time() + config.engine_wait_s),
        )
        agent = Agent(
            context=context,
            loop=loop,
            tasks=tasks,
            metrics=metrics,
            access=access,
            bus_errors=bus_errors,
            data=data,
            data_plane=DataPlane(interfaces, data),
            processes=ProcessReport(data, staging),
            staging=staging,
            folder=config.runtime_path,
            identity=identity,
            publisher=sockets.publisher,
            engines=engines,
            sender=_start_sender(config, identity, tasks),
        )
        service = make_service(agent)
        runtime = cls(config, agent, sockets, service, StatusReporter(config, agent, service))
        metrics.add_readings(partial(_bus_readings, attach, sockets), BUS_READINGS)
        await runtime._serve(reception)
        return runtime

    async def _serve(self, reception: Reception) -> None:
        agent, sockets, config = self.agent, self.sockets, self.config
        agent.engines.users.append(self.service)
        agent.data.on_change, agent.data.on_log = self._note_data, _log_data
        agent.data.on_cut = self._on_cut
        agent.tasks.start_soon(agent.data.run)
        self._serve_http()
        await agent.staging.open()
        if not is_one_machine(config):
            await agent.data_plane.open()
        elif config.backends != UCX_ONLY:
            await agent.data_plane.check_backends()
        reception.open(agent.engines)
        self._take_requests()
        await self.service.start()
        for owner in sockets:
            agent.tasks.start_soon(owner.run)
        agent.tasks.start_soon(agent.metrics.watch_loop_lag)
        agent.metrics.add_readings(self._data_readings, DATA_READINGS)
        agent.access.on_change.append(self._end_sessions)
        agent.tasks.start_soon(agent.data_plane.watch)
        self.report.is_started = True
        log.info(
            "agent.started",
            role=agent.identity.role.value,
            attach=str(config.attach_path),
            peer=agent.identity.peer_endpoint,
            events=agent.identity.events_endpoint,
            http=config.http_bind,
            server_key=agent.access.server_key,
            data=list(agent.data_plane.endpoints),
        )
        self.supervisor.notify("READY=1")
        agent.tasks.start_soon(self.supervisor.watch)

    async def end(self, signals: Signals) -> None:
        """Wait for a signal, and drain for ``drain_timeout_s`` or until a second signal."""
        received, timeout_s = await anext(signals), self.config.drain_timeout_s
        log.info("agent.draining", signal=received.name, timeout_s=timeout_s)
        self.report.is_draining = True
        self.supervisor.notify("STOPPING=1")
        self.service.start_draining()
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as drain:
                drain.start_soon(self._drain, drain.cancel_scope)
                await anext(signals)
                drain.cancel_scope.cancel()
        left = {name: count for name, count in self.service.counts().items() if count}
        self.service.stop()
        self.sockets.engines.leave(Leaving())
        log.info("agent.drained", left=left)

    async def _drain(self, scope: anyio.CancelScope) -> None:
        await self.service.drained()
        scope.cancel()

    def _note_data(self) -> None:
        agent, status = self.agent, self.agent.data.status()
        if status.pid:
            log.info("data.started", data_pid=status.pid, num_restarts=status.num_restarts)
            if status.num_restarts:
                agent.tasks.start_soon(agent.staging.check)
                agent.engines.check_memory()
                self.service.check_memory()
            if agent.data.is_open:
                agent.tasks.start_soon(agent.data_plane.check_until_done)
        elif not agent.data.is_closing:
            agent.processes.note_end()
            write = log.warning if agent.data.was_replaced else log.error
            write("data.ended", reason=status.last_end)

    def _on_cut(self, cut: Cut) -> None:
        if not self.agent.engines.on_cut(cut):
            self.service.on_cut(cut)

    def _serve_http(self) -> None:
        token = load_http_token(self.config)  # checks its file even without http_bind
        if not self.config.http_bind:
            return
        pages = AgentPages(self.agent.loop, self.agent.metrics.registry, report=self.report)
        with named("http_bind"):
            HttpServer(self.config.http_bind, pages, token)

    def _take_requests(self) -> None:
        def reply(request: Status, call: Call) -> None:
            status = self.report.status(request)
            if not request.faults:
                call.reply(status)
            elif (live := self.report.live()).done():
                call.reply(structs.replace(status, faults=live.result().status.faults))
            else:
                self.agent.tasks.start_soon(self._reply_with_faults, status, live, call)

        def reply_to_peer(request: Status, call: Call) -> None:
            if self.sockets.peers.knows(call):
                reply(request, call)
            else:
                call.reply(without_place(self.report.status(request)))

        self.sockets.engines.on(
            {
                Register: self._register,
                AwaitReady: self.agent.engines.await_ready,
                Detach: self.agent.engines.detach,
                Status: reply,
                **self.service.engine_handlers(),
            },
            gate=self.agent.engines.admit,
        )
        self.sockets.peers.on(
            {
                Status: reply_to_peer,
                Trace: lambda request, call: call.reply(self.report.trace(request)),
                **self.service.peer_handlers(),
            },
            gate=self.agent.access.gate,
        )

    async def _reply_with_faults(self, status: AgentStatus, made: Future[Live], call: Call) -> None:
        live = await asyncio.shield(asyncio.wrap_future(made))
        call.reply(structs.replace(status, faults=live.status.faults))

    def _end_sessions(self, lost: frozenset[str]) -> None:
        """End the sessions of keys that lost a role; all subscribers must reconnect."""
        for key in lost:
            self.sockets.peers.end_key(key)
        self.sockets.publisher.close_connections()

    def _register(self, wanted: Register, call: Call) -> None:
        if self.report.is_draining:
            raise KVBusError("the agent is draining", code=ErrorCode.DRAINING)
        role = self.agent.identity.role
        if wanted.role not in (None, role):
            raise KVBusError(
                f"this is a {role} agent, and the engine is a {wanted.role} engine",
                code=ErrorCode.CONFIG,
                agent=role.value,
                engine=str(wanted.role),
            )
        self.agent.engines.register(wanted, call)

    def _data_readings(self) -> dict[str, float]:
        registered = self.agent.engines.registered_bytes + self.agent.staging.registered_bytes
        is_open = self.agent.data.is_open and self.agent.data.is_running
        return {**self.agent.processes.readings(), "registered_bytes": registered * is_open}


def _bus_readings(attach: AttachServer, sockets: Sockets) -> dict[str, float]:
    servers = sockets.engines.counters, sockets.peers.counters
    return {
        "malformed_messages": sum(c.malformed for c in servers) + attach.num_malformed,
        "bus_busy": sum(c.busy for c in servers),
        "bus_repeats": sum(c.repeats_absorbed for c in servers),
        "peer_pings": sockets.peers.counters.pings,
        "replies_dropped": sum(c.dropped for c in servers),
        "attach_refused": attach.num_refused,
    }


def _identity(role: AgentRole, config: AgentConfig, sockets: Sockets, server_key: str) -> Welcome:
    def advertised(endpoint: str) -> str:
        host = config.advertise_host
        return f"tcp://{host}:{endpoint.rpartition(':')[2]}" if host else endpoint

    return Welcome(
        protocol=PROTOCOL_VERSION,
        agent_id=config.agent_id,
        agent_boot=sockets.peers.boot,
        role=role,
        engine_endpoint=sockets.engines.endpoint,
        peer_endpoint=advertised(sockets.peers.endpoint),
        events_endpoint=advertised(sockets.publisher.endpoint),
        server_key=server_key,
    )


def _start_sender(config: AgentConfig, identity: Welcome, tasks: TaskGroup) -> "SpanSender | None":
    """Raise `ConfigError` without kvbus[otel]."""
    if not config.otlp_endpoint:
        return None
    try:
        from kvbus.agent.otlp import SpanSender  # noqa: PLC0415  # may not be installed
    except ImportError as error:
        raise ConfigError(
            f"key 'otlp_endpoint': needs a package that is not here ({error.name}): "
            "pip install 'kvbus[otel]'",
            key="otlp_endpoint",
        ) from error
    resource = {
        "service.name": f"kvbus-{identity.role}",
        "service.instance.id": identity.agent_boot,
        "kvbus.agent_id": identity.agent_id,
    }
    sender = SpanSender(config.otlp_endpoint, resource)
    tasks.start_soon(sender.run)
    return sender


def _log_data(line: Log) -> None:
    getattr(log, line.level)(line.event, process="data", **line.fields)


def _attach_server(
    config: AgentConfig, reception: Reception, metrics: AgentMetrics
) -> AttachServer:
    return AttachServer(
        config.attach_path,
        reception.on_message,
        reception.on_closed,
        on_refusal=Refusals(metrics).of_attach,
        max_connections=MAX_ENGINE_PROCESSES,
    )


def _staging(config: AgentConfig, data: DataProcess, interfaces: tuple[str, ...]) -> StagingDevices:
    return StagingDevices(
        data,
        staging_bytes=config.staging_bytes,
        slot_bytes=config.slot_bytes,
        only=config.exposure == "staging",
        nic_reads_gpu=config.gpu_slots == "auto" and has_rdma(interfaces),
        on_gpu=config.gpu_slots == "gpu",
        measure_read=partial(measure_vram_read, backends=config.backends),
    )


def _is_before(loop: asyncio.AbstractEventLoop, when: float) -> bool:
    return loop.time() < when
