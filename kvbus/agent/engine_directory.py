"""The local engines of an agent."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import anyio
import psutil
import structlog
from anyio.abc import TaskGroup

from kvbus.agent.identity import check_protocol
from kvbus.agent.local_engine import EngineProcess, LocalEngine, engine_lost
from kvbus.agent.loop import guarded
from kvbus.agent.segments import Segments
from kvbus.agent.staging_devices import StagingDevices
from kvbus.bus import Call, EventPublisher, RequestServer
from kvbus.data.client import DataProcess
from kvbus.data.messages import Cut
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.geometry import RankSpec, validate_engine, validate_rank
from kvbus.memory.attach import AttachConnection, Lifeline, PassingAnswer
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import Hello, PassCuda, PassSegment, Welcome
from kvbus.protocol.engine import AwaitReady, Detach, RanksReady, Register
from kvbus.protocol.message import Empty, Message, from_body, to_body
from kvbus.protocol.tools import EngineEvent, Status

log = structlog.get_logger()

STARTS_WITHIN_S = 5.0

MAX_ENDED_NAMES = 4096


class EngineUser(Protocol):
    def on_engine_ready(self, engine: LocalEngine) -> None:
        """Called when all of it has registered."""

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """Called when a process of it has ended."""

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when no transfer can touch the memory of a lost engine."""


class EngineDirectory:
    """While the agent ``is_young``, engines of its previous process may still register again."""

    def __init__(
        self,
        *,
        data: DataProcess,
        staging: StagingDevices,
        bus_errors: BusErrors,
        lifeline: Lifeline,
        tasks: TaskGroup,
        identity: Welcome,
        server: RequestServer,
        publisher: EventPublisher,
        is_young: Callable[[], bool],
    ) -> None:
        self.engines: dict[str, LocalEngine] = {}
        self.pools: dict[str, LocalEngine] = {}
        """Memory of this agent that readers read as an engine's."""
        self.users: list[EngineUser] = []
        self.new_segments = partial(Segments, data, staging, bus_errors)
        self._tasks, self._lifeline = tasks, lifeline
        self._is_young = is_young
        self._identity, self._server, self._publisher = identity, server, publisher
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._by_connection: dict[AttachConnection, EngineProcess] = {}
        self._by_boot: dict[str, EngineProcess] = {}

    @property
    def registered_bytes(self) -> int:
        ranks = (rank for engine in self.engines.values() for rank in engine.ranks.values())
        sizes = (one.size_bytes for rank in ranks if rank.direct for one in rank.rank.segments)
        return sum(sizes)

    async def on_attach_message(
        self, connection: AttachConnection, message: dict[str, Any], fds: list[int]
    ) -> dict[str, Any] | PassingAnswer:
        op, body = message.get("op"), message.get("body")
        if not isinstance(body, dict):
            raise ProtocolError("attach message needs 'op' and a map 'body'")
        if op == Hello.op:
            hello, life = from_body(Hello, body), self._lifeline.new_read_end()
            try:
                return PassingAnswer(to_body(self._greet(connection, hello)), [life])
            except KVBusError:
                os.close(life)
                raise
        if op not in (PassSegment.op, PassCuda.op):
            raise ProtocolError(f"no attach message '{op}'", code=ErrorCode.UNKNOWN_OP)
        answer: Message
        if op == PassSegment.op:
            segment, segments = from_body(PassSegment, body), self._segments_of(connection)
            answer = await segments.take(segment, fds)
        else:
            cuda, segments = from_body(PassCuda, body), self._segments_of(connection)
            answer = await segments.take_cuda(cuda, fds)
        return to_body(answer)

    def on_attach_closed(self, connection: AttachConnection) -> None:
        process = self._by_connection.pop(connection, None)
        if process is None:
            return
        process.gone = True
        del self._by_boot[process.boot]
        self._server.sessions.end_boot(process.boot)
        if process.engine is not None:
            self._lose(process.engine, meant=process.detaching)
        else:
            self._tasks.start_soon(self._discard, process)

    # A reader's take and the end of an engine arrive on different sockets. An agent that was
    # stopped finds both when it continues, and may read the take first:
    #
    #     engine   leaves, hangs up ─▶ writes to its blocks
    #     agent    stopped ──────────────────────────────────▶ take: has the engine hung up? then no
    #
    # An engine hangs up before it writes. Therefore a check of the connection after the take sees
    # it.
    def end_if_left(self, engine_id: str) -> None:
        """Lose an engine with a closed connection that the loop has not processed yet."""
        engine = self.engines.get(engine_id)
        if engine is not None and engine.control is not None:
            connection = engine.control.connection
            if connection.has_hung_up:
                self.on_attach_closed(connection)

    def find_cuts(self, engine_id: str) -> None:
        engine = self.engines.get(engine_id)
        for process in list(engine.processes) if engine is not None else ():
            process.segments.find_cuts()

    def admit(self, call: Call) -> None:
        """Refuse a process without a hello on the attach socket, except for status requests.

        The first session with a boot id is the process's: no other process knows the id by then.
        """
        if call.op != Status.op:
            process = self.process_of(call)
            if process.session is None:
                process.open(call.session)

    def process_of(self, call: Call) -> EngineProcess:
        process = self._by_boot.get(call.session.boot)
        if process is None:
            raise _not_registered("send hello on the attach socket first")
        if process.session not in (None, call.session):
            raise _not_registered(
                "another connection speaks for this boot id; a sender that connects again must "
                "show its secret"
            )
        return process

    def engine_of(self, call: Call) -> LocalEngine:
        process = self.process_of(call)
        engine = _joined(process)
        if engine.lost:
            raise engine_lost()
        if engine.control is not process:
            raise _not_registered("this is not the control session")
        if not engine.is_whole:
            raise LocalError(
                f"{engine.num_missing_ranks} of {engine.spec.num_ranks} ranks are not registered",
                code=ErrorCode.ENGINE_NOT_READY,
            )
        return engine

    def part(self, engine_id: str, ranks: Iterable[int], *, rank_secret: str | None) -> LocalEngine:
        engine = self._known(engine_id)
        engine.check_rank_secret(rank_secret)
        if not set(ranks) <= engine.ranks.keys():
            raise _not_here(engine_id, ErrorCode.ENGINE_NOT_READY)
        return engine

    def find(self, engine_id: str) -> LocalEngine | None:
        return self.pools.get(engine_id) or self.engines.get(engine_id)

    def engine(self, engine_id: str, *, instance: str | None = None) -> LocalEngine:
        engine = self.find(engine_id)
        is_other = engine is not None and engine.instance not in ("", instance)
        if instance is not None and (is_other or instance in self._ended):
            raise LocalError(
                f"the process of engine '{engine_id}' that made the offer has ended",
                code=ErrorCode.ENGINE_LOST,
                engine_id=engine_id,
            )
        engine = self._known(engine_id)
        if not engine.ready:
            raise _not_here(engine_id, ErrorCode.ENGINE_NOT_READY)
        return engine

    def awaits_offers_of(self, engine_id: str) -> bool:
        engine = self.engines.get(engine_id)
        if engine is not None:
            return not engine.ready
        is_any = not engine_id and any(one.republishes for one in self.engines.values())
        return is_any or self._is_young()

    def check_published(self, engine_id: str, instance: str) -> None:
        try:
            self.engine(engine_id, instance=instance)
        except LocalError as error:
            if error.code is not ErrorCode.ENGINE_UNKNOWN:
                raise

    def _known(self, engine_id: str) -> LocalEngine:
        engine = self.find(engine_id)
        if engine is None:
            is_awaited = self._is_young()
            code = ErrorCode.ENGINE_NOT_READY if is_awaited else ErrorCode.ENGINE_UNKNOWN
            raise _not_here(engine_id, code)
        return engine

    def register(self, wanted: Register, call: Call) -> None:
        process = self.process_of(call)
        engine = self._join(process, wanted)
        if wanted.rank is None:
            engine.take_control(process, wanted)
            self._ended.pop(engine.instance, None)
            self._add(engine, process, call)
        else:
            step = partial(self._register_rank, engine, wanted.rank, wanted, process, call)
            self._tasks.start_soon(guarded, step, call.refuse)

    def await_ready(self, _: AwaitReady, call: Call) -> None:
        engine = _joined(self.process_of(call))
        if engine.is_whole:
            call.reply(RanksReady(engine.memory_name))
        elif engine.lost:
            raise engine_lost()
        else:
            engine.waiting.append(call)

    def see_republished(self, engine: LocalEngine) -> None:
        if engine.republishes:
            engine.republishes = False
            self._announce(engine)

    def detach(self, _: Detach, call: Call) -> None:
        self.process_of(call).detaching = True
        call.reply(Empty())

    def _greet(self, connection: AttachConnection, hello: Hello) -> Welcome:
        if connection in self._by_connection or hello.boot in self._by_boot:
            raise LocalError("this boot id has sent hello already", code=ErrorCode.ENGINE_CONFLICT)
        if self._server.sessions.has_ended(hello.boot):
            raise LocalError("this boot id was ended here: take a new one", code=ErrorCode.STALE)
        check_protocol(hello.min_protocol, hello.max_protocol)
        segments = self.new_segments(on_cut=partial(self._see_cut, connection))
        process = EngineProcess(hello.engine_id, hello.boot, connection, segments)
        self._by_connection[connection] = self._by_boot[hello.boot] = process
        log.info("engine.attached", engine_id=hello.engine_id, pid=connection.peer.pid)
        return self._identity

    def _segments_of(self, connection: AttachConnection) -> Segments:
        if connection not in self._by_connection:
            raise _not_registered("send hello first")
        return self._by_connection[connection].segments

    def _join(self, process: EngineProcess, wanted: Register) -> LocalEngine:
        spec = wanted.engine
        validate_engine(spec)
        if spec.engine_id != process.engine_id:
            raise LocalError(f"hello named '{process.engine_id}', register '{spec.engine_id}'")
        if process.engine is not None or spec.engine_id in self.pools:
            what = "this session is registered" if process.engine else "a pool has this id"
            raise LocalError(what, code=ErrorCode.ENGINE_CONFLICT)
        engine = self.engines.get(spec.engine_id) or LocalEngine(spec)
        taken = engine.control if wanted.rank is None else engine.ranks.get(wanted.rank.rank)
        if engine.spec != spec or taken is not None:
            how = "with another spec by" if engine.spec != spec else "by"
            raise LocalError(
                f"engine '{spec.engine_id}' is registered {how} {_holders(engine)}",
                code=ErrorCode.ENGINE_CONFLICT,
                engine_id=spec.engine_id,
            )
        return engine

    async def _register_rank(
        self,
        engine: LocalEngine,
        rank: RankSpec,
        wanted: Register,
        process: EngineProcess,
        call: Call,
    ) -> None:
        validate_rank(engine.spec, rank)
        memory = await process.segments.register(engine.spec, rank)
        try:
            joined = self._join(process, wanted)  # another process may have joined meanwhile
            if process.gone or engine.lost:
                raise LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
            is_named = wanted.instance and wanted.instance not in self._ended
            process.memory = wanted.instance if is_named else uuid.uuid4().hex
            joined.add_rank(memory, wanted.rank_secret, process.memory)
        except KVBusError:
            process.segments.remove(memory)
            raise
        self._add(joined, process, call)

    def _add(self, engine: LocalEngine, process: EngineProcess, call: Call) -> None:
        self.engines[engine.engine_id] = engine
        engine.processes.append(process)
        process.engine = engine
        call.reply(Empty())
        if engine.is_whole:
            self._announce(engine)
            waiting, engine.waiting = engine.waiting, []
            for one in waiting:
                one.reply(RanksReady(engine.memory_name))

    def _announce(self, engine: LocalEngine) -> None:
        if engine.ready:
            self._publish_event("engine.ready", engine)
            for user in self.users:
                user.on_engine_ready(engine)

    def _publish_event(self, event: str, engine: LocalEngine, *, logged_as: str = "") -> None:
        name, instance = engine.engine_id, engine.instance
        log.info(logged_as or event, engine_id=name, engine_instance=instance)
        self._publisher.publish(event, EngineEvent(name, instance))

    def check_memory(self) -> None:
        for process in self._by_boot.values():
            end = partial(self._see_unmapped, process)
            self._tasks.start_soon(guarded, process.segments.check, end)

    def _see_unmapped(self, process: EngineProcess, error: KVBusError) -> None:
        if not process.gone and error.code is not ErrorCode.ENGINE_LOST:
            log.error("engine.unmapped", engine_id=process.engine_id, reason=error.message)
            if process.engine is not None:
                self._lose(process.engine, meant=False)
            process.connection.shut_down()

    def on_cut(self, cut: Cut) -> bool:
        for process in self._by_boot.values():
            if process.segments.has(cut.memory):
                self._see_cut(process.connection, cut.segment_id)
                return True
        return False

    def _see_cut(self, connection: AttachConnection, segment_id: str) -> None:
        process = self._by_connection.get(connection)
        if process is None or (process.engine is not None and process.engine.lost):
            return
        log.error("segment.cut", engine_id=process.engine_id, segment_id=segment_id)
        self._note_ended(process.memory)
        if process.engine is not None:
            self._lose(process.engine, meant=False)
        connection.shut_down()

    def _note_ended(self, name: str) -> None:
        self._ended[name] = None
        if len(self._ended) > MAX_ENDED_NAMES:
            self._ended.popitem(last=False)

    def _lose(self, engine: LocalEngine, *, meant: bool) -> None:
        if engine.lost:
            return
        engine.lost = True
        del self.engines[engine.engine_id]
        self._note_ended(engine.instance)
        for call in engine.waiting:
            call.refuse(engine_lost())
        self._publish_event("engine.lost", engine, logged_as="engine.detached" if meant else "")
        for user in self.users:
            user.on_engine_lost(engine)
        self._tasks.start_soon(self._release, engine)

    async def _release(self, engine: LocalEngine) -> None:
        """Release the bytes of a lost engine, close its connections, then release the addresses."""
        for process in list(engine.processes):
            await self._discard(process)
            process.connection.shut_down()  # reports the release of the bytes
        for user in self.users if engine.is_direct else ():
            await user.quiesce(engine)
        for process in engine.processes:
            process.segments.remove()

    async def _discard(self, process: EngineProcess) -> None:
        await guarded(process.segments.discard, partial(_log_kept, process))


class Reception:
    """Attach handlers that delay early messages until the agent has started."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._directory: asyncio.Future[EngineDirectory] = loop.create_future()

    def open(self, directory: EngineDirectory) -> None:
        self._directory.set_result(directory)

    async def on_message(
        self, connection: AttachConnection, message: dict[str, Any], fds: list[int]
    ) -> dict[str, Any] | PassingAnswer:
        with anyio.move_on_after(STARTS_WITHIN_S):
            await asyncio.shield(self._directory)
        if not self._directory.done():
            raise LocalError("the agent is starting", code=ErrorCode.BUSY)
        return await self._directory.result().on_attach_message(connection, message, fds)

    def on_closed(self, connection: AttachConnection) -> None:
        if self._directory.done():
            self._directory.result().on_attach_closed(connection)


def _log_kept(process: EngineProcess, error: KVBusError) -> None:
    log.error("segment.kept", engine_id=process.engine_id, error=error.message)


def _holders(engine: LocalEngine) -> str:
    pids = sorted({process.connection.peer.pid for process in engine.processes})
    if not pids[0]:  # the kernel hides a process of another PID namespace
        return "a process of another container: end it, or choose another engine_id"
    named = ", ".join(f"{pid} (stopped)" if _is_stopped(pid) else str(pid) for pid in pids)
    ended = " ".join(map(str, pids))
    return f"process {named}: end it with 'kill -9 {ended}', or choose another engine_id"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):  # it has ended
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _joined(process: EngineProcess) -> LocalEngine:
    if process.engine is None:
        raise _not_registered("register first")
    return process.engine


def _not_registered(problem: str) -> LocalError:
    return LocalError(problem, code=ErrorCode.NOT_REGISTERED)


def _not_here(engine_id: str, code: ErrorCode) -> LocalError:
    return LocalError(f"engine '{engine_id}' is not here", code=code, engine_id=engine_id)
