"""An agent process: creates its parts, wires them, and runs from start to end."""

import asyncio
import resource
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import structlog
from msgspec import structs

from kvbus.agent.access import EVENTS, PEER, Access, load_http_token
from kvbus.agent.config import AgentConfig, named
from kvbus.agent.data_plane import (
    DataPlane,
    choose_interfaces,
    has_rdma,
    is_one_machine,
    restrict_ucx,
)
from kvbus.agent.engines import EngineDirectory
from kvbus.agent.http import AgentPages, HttpServer
from kvbus.agent.observe import Refusals
from kvbus.agent.processes import READINGS as PROCESS_READINGS
from kvbus.agent.service import Agent, Service
from kvbus.agent.slots import StagingDevices
from kvbus.agent.status import StatusReporter, without_place
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
from kvbus.data.messages import Cut, Log
from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.memory.attach import ENGINE_SOCKET, AttachServer, Lifeline
from kvbus.protocol.attach import Welcome
from kvbus.protocol.engine import AgentRole, AwaitReady, Detach, Leaving, Register
from kvbus.protocol.envelope import PROTOCOL_VERSION
from kvbus.protocol.tools import AgentStatus, Live, Status, Trace

if TYPE_CHECKING:
    from kvbus.agent.otlp import SpanSender

from kvbus.threads import settle_interpreter

log = structlog.get_logger()

ServiceFactory = Callable[[Agent], Service]
Signals = AsyncIterator[signal.Signals]

MOST_FILES = 1 << 16
"""Limit of open files that an agent sets; each segment of an engine needs one."""
MAX_ENGINE_PROCESSES = 64
BUS_READINGS = {
    "malformed_messages": "Frames that were no message, on any socket.",
    "bus_busy": "Requests that were refused because too many were pending.",
    "bus_repeats": "Requests that came again, by a new connection, while they were in progress.",
    "peer_pings": "Signs of life that other agents have asked for.",
    "replies_dropped": "Replies, notices and large requests whose peer was gone or did not read.",
    "attach_refused": "Connections to the attach socket that were turned away.",
}
DATA_READINGS = {**PROCESS_READINGS, "registered_bytes": "Memory registered with NIXL."}


async def run_agent(
    role: AgentRole, config: AgentConfig, boot: str, make_service: ServiceFactory
) -> None:
    """Run an agent until SIGTERM or SIGINT; raises `KVBusError` if it cannot start."""
    lifeline = Lifeline()  # must be first, see Lifeline
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_failure)
    access = Access.open(config)
    interfaces = choose_interfaces(config)
    restrict_ucx(interfaces, config.data_ports)
    _allow_files()
    data = DataProcess(
        spawner(loop, held_fds=(lifeline.write_fd,)),
        new_boot=new_boot_id,
        name=config.agent_id,
        slice_bytes=config.slice_bytes,
        copy_threads=config.copy_threads,
    )
    try:
        with (
            anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
            new_context() as context,
        ):
            async with anyio.create_task_group() as tasks:
                runtime = Runtime(
                    role=role,
                    config=config,
                    boot=boot,
                    data=data,
                    tasks=tasks,
                    staging=StagingDevices(
                        data,
                        staging_bytes=config.staging_bytes,
                        slot_bytes=config.slot_bytes,
                        only=config.exposure == "staging",
                        nic_reads_gpu=has_rdma(interfaces),
                    ),
                    data_plane=DataPlane(interfaces, data),
                    access=access,
                    lifeline=lifeline,
                )
                runtime.bus_errors.install()  # stays until the process ends
                await runtime.start(context, make_service)
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


@dataclass(slots=True, kw_only=True)
class Runtime(Agent):
    role: AgentRole
    config: AgentConfig
    boot: str
    engine_socket: RequestServer = field(init=False)
    peer_socket: RequestServer = field(init=False)
    service: Service = field(init=False)
    report: StatusReporter = field(init=False)
    http: HttpServer | None = None

    async def start(self, context: BusContext, make_service: ServiceFactory) -> None:
        self.context, self.loop = context, asyncio.get_running_loop()
        self.folder = self.config.runtime_path
        self.data.on_change, self.data.on_log = self._note_data, _log_data
        self.data.on_cut = self._on_cut
        self.tasks.start_soon(self.data.run)
        self.engines = engines = EngineDirectory(
            data=self.data,
            staging=self.staging,
            bus_errors=self.bus_errors,
            lifeline=self.lifeline,
            tasks=self.tasks,
            is_young=partial(_is_before, self.loop, self.loop.time() + self.config.engine_wait_s),
        )
        attach = AttachServer(
            self.config.attach_path,
            engines.on_attach_message,
            engines.on_attach_closed,
            on_refusal=Refusals(self.metrics).of_attach,
            max_connections=MAX_ENGINE_PROCESSES,
        )
        await self.tasks.start(attach.serve)
        self._bind()
        self.sender = self._start_sender()
        self.service = make_service(self)
        self.report = StatusReporter(self.config, self, self.service)
        self._serve_http()
        await self.staging.open()
        if not is_one_machine(self.config):
            await self.data_plane.open()
        engines.open(
            self.identity, server=self.engine_socket, publisher=self.publisher, user=self.service
        )
        self._take_requests()
        await self.service.start()
        for owner in (self.engine_socket, self.peer_socket, self.publisher):
            self.tasks.start_soon(owner.run)
        self.tasks.start_soon(self.metrics.watch_loop_lag)
        self.metrics.add_readings(partial(self._bus_readings, attach), BUS_READINGS)
        self.metrics.add_readings(self._data_readings, DATA_READINGS)
        self.access.on_change.append(self._end_sessions)
        self.tasks.start_soon(self.data_plane.watch)
        self.report.is_started = True
        log.info(
            "agent.started",
            role=self.role.value,
            attach=str(self.config.attach_path),
            peer=self.identity.peer_endpoint,
            events=self.identity.events_endpoint,
            http=self.config.http_bind,
            server_key=self.access.server_key,
            data=list(self.data_plane.endpoints),
        )

    async def end(self, signals: Signals) -> None:
        """Wait for a signal, drain for at most ``drain_timeout_s``, and stop the remaining work.

        A second signal ends the drain early.
        """
        received, timeout_s = await anext(signals), self.config.drain_timeout_s
        log.info("agent.draining", signal=received.name, timeout_s=timeout_s)
        self.report.is_draining = True
        self.service.start_draining()
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as drain:
                drain.start_soon(self._drain, drain.cancel_scope)
                await anext(signals)
                drain.cancel_scope.cancel()
        left = {name: count for name, count in self.service.counts().items() if count}
        self.service.stop()
        self.engine_socket.leave(Leaving())
        log.info("agent.drained", left=left)

    async def _drain(self, scope: anyio.CancelScope) -> None:
        await self.service.drained()
        scope.cancel()

    def _bind(self) -> None:
        self.access.start(self.context, self.tasks, self.metrics)
        server = partial(RequestServer, self.context, boot=self.boot, on_fault=_log_request_failure)
        self.engine_socket = server(
            f"ipc://{self.folder / ENGINE_SOCKET}",
            gate=self.engines.admit,
            on_refusal=Refusals(self.metrics).of_call,
        )
        with named("peer_bind"):
            self.peer_socket = server(
                self.config.peer_bind,
                gate=self.access.gate,
                options=self.access.options(PEER),
                on_refusal=Refusals(self.metrics).of_call,
            )
        with named("events_bind"):
            self.publisher = EventPublisher(
                self.context,
                self.config.events_bind,
                boot=self.boot,
                heartbeat_s=self.config.heartbeat_s,
                options=self.access.options(EVENTS),
            )
        self.identity = Welcome(
            protocol=PROTOCOL_VERSION,
            agent_id=self.config.agent_id,
            agent_boot=self.boot,
            role=self.role,
            engine_endpoint=self.engine_socket.endpoint,
            peer_endpoint=self._advertised(self.peer_socket.endpoint),
            events_endpoint=self._advertised(self.publisher.endpoint),
            server_key=self.access.server_key,
        )

    def _advertised(self, endpoint: str) -> str:
        host = self.config.advertise_host
        return f"tcp://{host}:{_port(endpoint)}" if host else endpoint

    def _note_data(self) -> None:
        status = self.data.status()
        if status.pid:
            log.info("data.started", data_pid=status.pid, num_restarts=status.num_restarts)
            if status.num_restarts:
                self.tasks.start_soon(self.staging.check)
                self.engines.check_memory()
            if self.data.is_open:
                self.tasks.start_soon(self.data_plane.look_at_next)
        elif not self.data.is_closing:
            self.processes.note_end()
            if self.data.was_replaced:
                log.warning("data.ended", reason=status.last_end)
            else:
                log.error("data.ended", reason=status.last_end)

    def _on_cut(self, cut: Cut) -> None:
        if not self.engines.on_cut(cut):
            self.service.on_cut(cut)

    def _start_sender(self) -> "SpanSender | None":
        """Return None without a collector; raise `ConfigError` without kvbus[otel]."""
        if not self.config.otlp_endpoint:
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
            "service.name": f"kvbus-{self.role}",
            "service.instance.id": self.boot,
            "kvbus.agent_id": self.config.agent_id,
        }
        sender = SpanSender(self.config.otlp_endpoint, resource)
        self.tasks.start_soon(sender.run)
        return sender

    def _serve_http(self) -> None:
        token = load_http_token(self.config)
        if not self.config.http_bind:
            return
        pages = AgentPages(self.loop, self.metrics.registry, report=self.report)
        with named("http_bind"):
            self.http = HttpServer(self.config.http_bind, pages, token)

    def _take_requests(self) -> None:
        def tell(asked: Status, call: Call) -> None:
            told = self.report.status(asked)
            if not asked.faults:
                call.reply(told)
            elif (live := self.report.live()).done():
                call.reply(structs.replace(told, faults=live.result().status.faults))
            else:
                self.tasks.start_soon(self._tell_faults, told, live, call)

        def tell_peer(asked: Status, call: Call) -> None:
            if self.peer_socket.knows(call):
                tell(asked, call)
            else:
                call.reply(without_place(self.report.status(asked)))

        self.engine_socket.on(
            {
                Register: self._register,
                AwaitReady: self.engines.await_ready,
                Detach: self.engines.detach,
                Status: tell,
                **self.service.engine_handlers(),
            }
        )
        self.peer_socket.on(
            {
                Status: tell_peer,
                Trace: lambda asked, call: call.reply(self.report.trace(asked)),
                **self.service.peer_handlers(),
            }
        )

    async def _tell_faults(self, told: AgentStatus, made: Future[Live], call: Call) -> None:
        live = await asyncio.shield(asyncio.wrap_future(made))
        call.reply(structs.replace(told, faults=live.status.faults))

    def _end_sessions(self, lost: frozenset[str]) -> None:
        """End the sessions of keys that lost a role; all subscribers must reconnect."""
        for key in lost:
            self.peer_socket.end_key(key)
        self.publisher.hang_up()

    def _register(self, wanted: Register, call: Call) -> None:
        if self.report.is_draining:
            raise KVBusError("the agent is draining", code=ErrorCode.DRAINING)
        if wanted.role not in (None, self.role):
            raise KVBusError(
                f"this is a {self.role} agent, and the engine is a {wanted.role} engine",
                code=ErrorCode.CONFIG,
                agent=self.role.value,
                engine=str(wanted.role),
            )
        self.engines.register(wanted, call)

    def _bus_readings(self, attach: AttachServer) -> dict[str, float]:
        servers = (self.engine_socket.counters, self.peer_socket.counters)
        return {
            "malformed_messages": sum(c.malformed for c in servers) + attach.num_malformed,
            "bus_busy": sum(c.busy for c in servers),
            "bus_repeats": sum(c.repeats_absorbed for c in servers),
            "peer_pings": self.peer_socket.counters.pings,
            "replies_dropped": sum(c.dropped for c in servers),
            "attach_refused": attach.num_refused,
        }

    def _data_readings(self) -> dict[str, float]:
        registered = self.engines.registered_bytes + self.staging.registered_bytes
        is_open = self.data.is_open and self.data.is_running
        return {**self.processes.readings(), "registered_bytes": registered * is_open}


def _log_data(line: Log) -> None:
    getattr(log, line.level)(line.event, process="data", **line.fields)


def _is_before(loop: asyncio.AbstractEventLoop, when: float) -> bool:
    return loop.time() < when


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
