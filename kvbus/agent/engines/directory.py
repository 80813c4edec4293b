"""The local engines of an agent: their processes, their registration, and their end.

Refuses two engines under one id, processes of one engine that disagree about it, and requests of
a process that did not attach. An engine is lost as a whole when any of its processes ends.
"""

from collections.abc import Callable, Iterable
from typing import Any

import structlog
from anyio.abc import TaskGroup

from kvbus.agent.engines.local_engine import EngineProcess, LocalEngine, engine_lost, not_here
from kvbus.agent.engines.memory_return import MemoryReturn
from kvbus.agent.engines.segment_intake import SegmentIntake
from kvbus.agent.process.guard import guarded
from kvbus.agent.process.identity import AgentIdentity
from kvbus.agent.staging.devices import StagingDevices
from kvbus.bus import Call, RequestServer
from kvbus.errors import ErrorCode, LocalError, ProtocolError
from kvbus.geometry import validate_engine, validate_rank
from kvbus.memory.attach import AttachConnection
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol.attach import Hello, PassCuda, PassSegment
from kvbus.protocol.engine import AwaitReady, Detach, Register
from kvbus.protocol.message import Empty, Message, from_body, to_body
from kvbus.protocol.peer import Status
from kvbus.transport import Transport

log = structlog.get_logger()


EngineHook = Callable[[LocalEngine], None]


class EngineDirectory:
    """All local engines; the agent's attach handler, and the handler of registration requests.

    ``on_ready`` and ``on_lost`` are told of engines, ``memory`` takes back what they passed. With
    ``lend`` other agents of this machine can be passed it, too.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        staging: StagingDevices,
        memory: MemoryReturn,
        bus_errors: BusErrors,
        max_process_segments: int,
        lend: bool,
        tasks: TaskGroup,
        on_ready: EngineHook,
        on_lost: EngineHook,
    ) -> None:
        self.engines: dict[str, LocalEngine] = {}
        self.identity: AgentIdentity | None = None
        self.server: RequestServer | None = None
        self.is_replaced = False
        self._transport, self._tasks = transport, tasks
        self._memory = memory
        self._intake = SegmentIntake(
            staging,
            bus_errors,
            max_segments=max_process_segments,
            lend=lend,
            on_cut=self._lose_cut,
        )
        self._on_ready, self._on_lost = on_ready, on_lost
        self._by_connection: dict[AttachConnection, EngineProcess] = {}
        self._by_boot: dict[str, EngineProcess] = {}

    async def on_attach_message(
        self, connection: AttachConnection, message: dict[str, Any], fds: list[int]
    ) -> dict[str, Any]:
        """Answer one message of the attach socket; raises the `KVBusError` that refuses it."""
        op, body = message.get("op"), message.get("body")
        if not isinstance(body, dict):
            raise ProtocolError("attach message needs 'op' and a map 'body'")
        if op == Hello.op:
            return to_body(self._greet(connection, from_body(Hello, body)))
        if op == PassSegment.op:
            segment, process = from_body(PassSegment, body), self._greeted(connection)
            return to_body(await self._intake.take(process, segment, fds))
        if op == PassCuda.op:
            cuda, process = from_body(PassCuda, body), self._greeted(connection)
            return to_body(await self._intake.take_cuda(process, cuda))
        raise ProtocolError(f"no attach message '{op}'", code=ErrorCode.UNKNOWN_OP)

    def on_attach_closed(self, connection: AttachConnection) -> None:
        """The process at the other end died, or meant to leave."""
        process = self._by_connection.pop(connection, None)
        if process is None:
            return
        process.gone = True
        del self._by_boot[process.boot]
        if self.server is not None:
            self.server.forget(process.boot)
        if process.engine is not None:
            self._lose(process.engine, meant=process.detaching)
        else:
            self._tasks.start_soon(self._memory.give_back, [process])

    def admit(self, call: Call) -> None:
        """Who has not said hello on the attach socket may ask for the status, and no more.

        The first session under a boot id is the process's: nobody else has heard of it by then.
        """
        if call.op != Status.op:
            process = self.process_of(call)
            process.session = call.session
            call.session.pinned = True

    def process_of(self, call: Call) -> EngineProcess:
        """The attached process that asks; raises `LocalError` when there is none."""
        process = self._by_boot.get(call.session.boot)
        if process is None:
            raise LocalError("say hello on the attach socket first", code=ErrorCode.NOT_REGISTERED)
        if process.session not in (None, call.session):
            raise LocalError(
                "another connection speaks for this boot id; a sender that connects again must "
                "show its secret",
                code=ErrorCode.NOT_REGISTERED,
            )
        return process

    def engine_of(self, call: Call) -> LocalEngine:
        """The ready engine whose control process asks; raises `LocalError` when there is none."""
        process = self.process_of(call)
        engine = process.engine
        if engine is None:
            raise LocalError("register first", code=ErrorCode.NOT_REGISTERED)
        if engine.lost:
            raise engine_lost()
        if engine.control is not process:
            raise LocalError("this is not the control session", code=ErrorCode.NOT_REGISTERED)
        if not engine.ready:
            raise LocalError(
                f"{engine.num_missing_ranks} of {engine.spec.num_ranks} ranks are not registered",
                code=ErrorCode.ENGINE_NOT_READY,
            )
        return engine

    def part(self, engine_id: str, ranks: Iterable[int], *, access: str | None) -> LocalEngine:
        """The engine whose ``ranks`` are here, wherever its home is; raises `LocalError`."""
        engine = self.engines.get(engine_id)
        if engine is None:
            raise not_here(engine_id, ErrorCode.ENGINE_UNKNOWN)
        engine.check_access(access)
        if not set(ranks) <= engine.ranks.keys():
            raise not_here(engine_id, ErrorCode.ENGINE_NOT_READY)
        return engine

    def engine(self, engine_id: str, *, instance: str | None = None) -> LocalEngine:
        """The ready engine with that id, and instance if given; raises `LocalError` if none."""
        engine = self.engines.get(engine_id)
        if engine is not None and engine.ready and instance not in (None, engine.instance):
            raise LocalError(
                f"engine '{engine_id}' came back as a new process", code=ErrorCode.STALE
            )
        if engine is None or not engine.ready:
            code = ErrorCode.ENGINE_UNKNOWN if engine is None else ErrorCode.ENGINE_NOT_READY
            raise not_here(engine_id, code)
        return engine

    def register(self, wanted: Register, call: Call) -> None:
        """Answer once the memory is registered with NIXL."""
        process = self.process_of(call)
        engine = self._join(process, wanted)
        process.wants_notices = wanted.rank is None or wanted.notices
        process.follows = wanted.follows
        if wanted.rank is None:
            self._register_control(engine, process, wanted)
            call.reply(Empty())
            self._announce(engine)
        else:
            self._tasks.start_soon(self._register_rank, call, process, engine, wanted)

    def await_ready(self, _: AwaitReady, call: Call) -> None:
        """Answer when the caller's engine is ready."""
        engine = self.process_of(call).engine
        if engine is None:
            raise LocalError("register first", code=ErrorCode.NOT_REGISTERED)
        if engine.ready:
            call.reply(Empty())
        elif engine.lost:
            raise engine_lost()
        else:
            engine.waiting.append(call)

    def detach(self, _: Detach, call: Call) -> None:
        """The end-of-file that follows is meant."""
        self.process_of(call).detaching = True
        call.reply(Empty())

    def _greet(self, connection: AttachConnection, hello: Hello) -> Message:
        if self.identity is None:
            raise LocalError("the agent is starting", code=ErrorCode.BUSY)
        if connection in self._by_connection or hello.boot in self._by_boot:
            raise LocalError("this boot id has said hello already", code=ErrorCode.ENGINE_CONFLICT)
        if self.server is not None and self.server.sessions.has_ended(hello.boot):
            raise LocalError("this boot id was ended here: take a new one", code=ErrorCode.STALE)
        welcome = self.identity.welcome(hello)
        process = EngineProcess(hello.engine_id, hello.boot, connection)
        self._by_connection[connection] = self._by_boot[hello.boot] = process
        log.info("engine.attached", engine_id=hello.engine_id, pid=connection.peer.pid)
        return welcome

    def _greeted(self, connection: AttachConnection) -> EngineProcess:
        process = self._by_connection.get(connection)
        if process is None:
            raise LocalError("say hello first", code=ErrorCode.NOT_REGISTERED)
        return process

    def _lose_cut(self, process: EngineProcess) -> None:
        """The KV of an engine is gone, by its own doing."""
        if process.engine is not None:
            self._lose(process.engine, meant=False)
        process.connection.hang_up()

    def _join(self, process: EngineProcess, wanted: Register) -> LocalEngine:
        spec = wanted.engine
        validate_engine(spec)
        if spec.engine_id != process.engine_id:
            raise LocalError(f"hello said '{process.engine_id}', register '{spec.engine_id}'")
        if process.engine is not None:
            raise LocalError("this session is registered", code=ErrorCode.ENGINE_CONFLICT)
        engine = self.engines.get(spec.engine_id)
        if engine is not None and engine.spec != spec:
            raise LocalError(
                f"engine '{spec.engine_id}' is registered with another spec",
                code=ErrorCode.ENGINE_CONFLICT,
            )
        taken = engine is not None and (
            engine.control is not None if wanted.rank is None else wanted.rank.rank in engine.ranks
        )
        if taken:
            raise LocalError(
                f"engine '{spec.engine_id}' is registered by another process",
                code=ErrorCode.ENGINE_CONFLICT,
                engine_id=spec.engine_id,
            )
        return engine or LocalEngine(spec)

    def _register_control(
        self, engine: LocalEngine, process: EngineProcess, wanted: Register
    ) -> None:
        engine.check_others(wanted.others)
        engine.check_whole()
        engine.take_control(process, wanted.others)
        self._add(engine, process)

    async def _register_rank(
        self, call: Call, process: EngineProcess, engine: LocalEngine, wanted: Register
    ) -> None:
        async def register() -> None:
            if wanted.rank is None:
                raise LocalError("a rank is needed")
            validate_rank(engine.spec, wanted.rank)
            memory = await process.segments.register(wanted.rank, self._transport)
            joined = self._join(process, wanted)  # another process may have come in between
            if process.gone or engine.lost:
                raise LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
            joined.check_rank_is_here(memory.rank.rank)
            joined.check_whole(memory.rank)
            joined.add_rank(memory, process.boot, wanted.access)
            self._add(joined, process)
            call.reply(Empty())
            self._announce(joined)

        await guarded(register, call.refuse)

    @property
    def num_processes(self) -> int:
        """How many sessions are attached."""
        return len(self._by_connection)

    def send_on(self) -> None:
        """A successor is there: tell those that follow to it, now and when they register."""
        self.is_replaced = True
        for process in list(self._by_boot.values()):
            process.send_on()

    def _add(self, engine: LocalEngine, process: EngineProcess) -> None:
        self.engines[engine.engine_id] = engine
        engine.processes.add(process)
        process.engine = engine
        if self.is_replaced:
            process.send_on()

    def _announce(self, engine: LocalEngine) -> None:
        if not engine.ready:
            return
        log.info("engine.ready", engine_id=engine.engine_id, engine_instance=engine.instance)
        self._on_ready(engine)
        waiting, engine.waiting = engine.waiting, []
        for call in waiting:
            call.reply(Empty())

    def _lose(self, engine: LocalEngine, *, meant: bool) -> None:
        if engine.lost:
            return
        engine.lost = True
        del self.engines[engine.engine_id]
        event = "engine.detached" if meant else "engine.lost"
        log.info(event, engine_id=engine.engine_id, engine_instance=engine.instance)
        for call in engine.waiting:
            call.refuse(engine_lost())
        self._on_lost(engine)
        self._tasks.start_soon(self._memory.take_away, list(engine.processes), engine)
