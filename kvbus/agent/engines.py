"""The local engines of an agent: their processes, their registration, and their end.

An engine is lost as a whole when any of its processes ends.
"""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import structlog
from anyio.abc import TaskGroup

from kvbus.agent.identity import check_protocol
from kvbus.agent.loop import guarded, in_thread
from kvbus.agent.segments import RankMemory, Segments
from kvbus.agent.slots import StagingDevices
from kvbus.bus import Call, EventPublisher, RequestServer, Session, new_secret
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, ProtocolError
from kvbus.geometry import EngineSpec, RankSpec, validate_engine, validate_rank, validate_ranks
from kvbus.memory.attach import AttachConnection
from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.pages import Pages
from kvbus.planning import PlacedRank
from kvbus.protocol.attach import Hello, PassCuda, PassSegment, Welcome
from kvbus.protocol.engine import AgentRanks, AwaitReady, Detach, Fetched, Register
from kvbus.protocol.events import EngineEvent
from kvbus.protocol.message import Empty, Message, check_right, from_body, to_body
from kvbus.protocol.peer import EngineMemory
from kvbus.protocol.status import Status
from kvbus.transport import Registration, Transport

log = structlog.get_logger()

MAX_BLOCK_ID = 2**32 - 1
MOST_KEPT = 4096
"""Mappings of zeros that stay when their engine is gone, of those that the machine allows."""


@dataclass(slots=True, eq=False)
class EngineProcess:
    """One process of an engine: its attach connection, its session, the segments it passed."""

    engine_id: str
    boot: str
    connection: AttachConnection
    segments: Segments
    session: Session | None = None
    engine: LocalEngine | None = None
    wants_fetched: bool = False
    detaching: bool = False
    gone: bool = False

    def open(self, session: Session) -> None:
        """It asks by this session from now on; if it does not read, it is sent away."""
        self.session = session
        session.pinned, session.on_unread = True, self._send_away

    def notify(self, notice: Message) -> None:
        """Tell the process."""
        if self.session is not None:
            self.session.notify(notice.op, notice)

    def _send_away(self) -> None:
        if not self.gone and not self.detaching:
            log.error("engine.unresponsive", engine_id=self.engine_id)
            self.connection.hang_up()


@dataclass(slots=True, eq=False)
class LocalEngine:
    """An engine: one control process, and one that holds the memory of each rank.

    The agent that has the control process is the engine's home; ``others`` have the ranks that are
    not here. An agent without it has some ranks of an engine whose home is elsewhere.
    """

    spec: EngineSpec
    control: EngineProcess | None = None
    others: tuple[AgentRanks, ...] = ()
    ranks: dict[int, RankMemory] = field(default_factory=dict)
    memory_id: str = ""
    """Stands for the processes that hold the ranks here: a rank that came back is another."""
    instance: str = ""
    """Stands for the control process, and may be told to anybody; empty before that came.

    Its boot id may not: on the engine socket that is who it is.
    """
    num_missing_ranks: int = field(init=False)
    """Ranks that are neither here nor at one of the others."""
    processes: set[EngineProcess] = field(default_factory=set)
    waiting: list[Call] = field(default_factory=list)
    lost: bool = False
    _accesses: list[str] = field(default_factory=list, repr=False)
    _rank_boots: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_missing_ranks = self.spec.num_ranks

    @property
    def engine_id(self) -> str:
        """The id that the engine chose."""
        return self.spec.engine_id

    @property
    def ready(self) -> bool:
        """Whether this is its home, and all of its processes here are registered and alive."""
        return self.control is not None and not self.num_missing_ranks and not self.lost

    @property
    def access(self) -> str:
        """What is shown to ask about the memory here; empty while nobody may."""
        return self._accesses[0] if self._accesses else ""

    def check_access(self, shown: str | None) -> None:
        """Raise `LocalError` (``forbidden``) unless ``shown`` gives access to the memory here."""
        check_right(shown, *self._accesses)

    @property
    def devices(self) -> set[str]:
        """Where the memory of the ranks here is."""
        return {rank.device for rank in self.ranks.values()}

    @property
    def registrations(self) -> list[Registration]:
        """All memory of the engine, as NIXL knows it."""
        return [reg for rank in self.ordered_ranks() for reg in rank.registrations]

    def ordered_ranks(self) -> list[RankMemory]:
        """The ranks by number."""
        return [self.ranks[number] for number in sorted(self.ranks)]

    def placed(self) -> list[PlacedRank]:
        """The ranks as the planner wants them."""
        return [rank.placed(self.spec) for rank in self.ordered_ranks()]

    def memory(self) -> EngineMemory:
        """The ranks as a peer wants them."""
        ranks = self.ordered_ranks()
        return EngineMemory(
            engine=self.spec,
            ranks=tuple(rank.rank for rank in ranks),
            addresses=tuple(rank.addresses for rank in ranks),
        )

    def num_blocks(self, group: str) -> int:
        """Blocks that every rank here has for ``group``; without bound when none holds it."""
        held = [rank.num_blocks[group] for rank in self.ranks.values() if group in rank.num_blocks]
        return min(held, default=MAX_BLOCK_ID + 1)

    def notify(self, notice: Message) -> None:
        """Tell the control process."""
        if not self.lost and self.control is not None:
            self.control.notify(notice)

    def notify_ranks(self, fetched: Fetched) -> None:
        """Tell the processes of ranks that want to know how fetches end."""
        for process in self.processes:
            if process.wants_fetched:
                process.notify(fetched)

    def take_control(self, process: EngineProcess, others: tuple[AgentRanks, ...]) -> None:
        """This is the engine's home from now on; every time that is another instance.

        Raises `GeometryError` unless ``others`` have each rank once, and leave one to be here.
        """
        self._check_others(others)
        self._check_whole([])
        self.control, self.others = process, others
        self._count_missing()
        self.instance = uuid.uuid4().hex
        self._accesses.append(new_secret())

    def add_rank(self, memory: RankMemory, boot: str, access: str | None) -> None:
        """The process ``boot`` has registered a rank; who shows ``access`` may ask about it.

        Raises `GeometryError` for a rank that is elsewhere, or with which the KV is not whole.
        """
        number = memory.rank.rank
        for other in self.others:
            if number in other.ranks:
                raise self._refusal(
                    f"its control session said that rank {number} is at {other.endpoint}", "rank"
                )
        self._check_whole([memory.rank])
        if access is not None:
            self._accesses.append(access)
        self.ranks[number], self._rank_boots[number] = memory, boot
        self._count_missing()
        boots = "".join(f"{rank}:{boot};" for rank, boot in sorted(self._rank_boots.items()))
        self.memory_id = blake2b(boots.encode(), digest_size=16).hexdigest()

    def _count_missing(self) -> None:
        elsewhere = sum(len(other.ranks) for other in self.others)  # each is named once
        self.num_missing_ranks = self.spec.num_ranks - elsewhere - len(self.ranks)

    def _check_whole(self, more: list[RankSpec]) -> None:
        """Once the last rank is here, they must hold all KV."""
        ranks = [memory.rank for memory in self.ranks.values()] + more
        if len(ranks) == self.spec.num_ranks:
            validate_ranks(self.spec, ranks)

    def _check_others(self, others: tuple[AgentRanks, ...]) -> None:
        named = Counter(rank for other in others for rank in other.ranks)
        twice = [rank for rank, times in named.items() if times > 1 or rank in self.ranks]
        problem = ""
        if twice:
            problem = f"rank {min(twice)} is named twice, or at two agents"
        elif len({other.endpoint for other in others}) != len(others):
            problem = "an agent is named twice"
        elif max(named, default=0) >= self.spec.num_ranks:
            problem = f"rank {max(named)} of {self.spec.num_ranks} ranks"
        elif len(named) >= self.spec.num_ranks:
            problem = "no rank is at the engine's home"
        if problem:
            raise self._refusal(problem, "others")

    def _refusal(self, problem: str, named: str) -> GeometryError:
        return GeometryError(f"engine '{self.engine_id}': {problem}", field=named)


def engine_lost() -> LocalError:
    """Why what is done for an engine fails once one of its processes ended."""
    return LocalError("a process of this engine ended", code=ErrorCode.ENGINE_LOST)


class EngineUser(Protocol):
    """The service of the agent: what it does with engines, and with the memory of a lost one."""

    def on_engine_ready(self, engine: LocalEngine) -> None:
        """All of the engine is there."""
        ...

    def on_engine_lost(self, engine: LocalEngine) -> None:
        """The engine is gone."""
        ...

    async def copied(self, engine: LocalEngine) -> None:
        """Return when no copy can touch the memory of a lost engine any more."""
        ...

    async def quiesce(self, engine: LocalEngine) -> None:
        """Return when no transfer can either."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of its agent the directory of engines uses once there is all of it."""

    identity: Welcome
    server: RequestServer
    publisher: EventPublisher
    user: EngineUser


class EngineDirectory:
    """All local engines; the agent's attach handler, and the handler of registration requests.

    With ``lend`` other agents of this machine can be passed their memory, too. Engines are let in
    once `open` was called.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        staging: StagingDevices,
        bus_errors: BusErrors,
        lend: bool,
        tasks: TaskGroup,
    ) -> None:
        self.engines: dict[str, LocalEngine] = {}
        self._new_segments = partial(Segments, transport, staging, bus_errors, lend=lend)
        self._tasks = tasks
        self._around: Surroundings | None = None
        self._by_connection: dict[AttachConnection, EngineProcess] = {}
        self._by_boot: dict[str, EngineProcess] = {}
        self._kept: deque[Pages] = deque(maxlen=MOST_KEPT)

    def open(self, around: Surroundings) -> None:
        """Let engines in from now on."""
        self._around = around

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
            return to_body(await process.segments.take(segment, fds))
        if op == PassCuda.op:
            cuda, process = from_body(PassCuda, body), self._greeted(connection)
            return to_body(await process.segments.take_cuda(cuda))
        raise ProtocolError(f"no attach message '{op}'", code=ErrorCode.UNKNOWN_OP)

    def on_attach_closed(self, connection: AttachConnection) -> None:
        """The process at the other end died, or meant to leave."""
        process = self._by_connection.pop(connection, None)
        if process is None:
            return
        process.gone = True
        del self._by_boot[process.boot]
        self._opened.server.forget(process.boot)
        if process.engine is not None:
            self._lose(process.engine, meant=process.detaching)
        else:
            self._tasks.start_soon(self._unmap, [process])

    def admit(self, call: Call) -> None:
        """Who has not said hello on the attach socket may ask for the status, and no more.

        The first session under a boot id is the process's: nobody else has heard of it by then.
        """
        if call.op != Status.op:
            process = self.process_of(call)
            if process.session is None:
                process.open(call.session)

    def process_of(self, call: Call) -> EngineProcess:
        """The attached process that asks; raises `LocalError` when there is none."""
        process = self._by_boot.get(call.session.boot)
        if process is None:
            raise _not_registered("say hello on the attach socket first")
        if process.session not in (None, call.session):
            raise _not_registered(
                "another connection speaks for this boot id; a sender that connects again must "
                "show its secret"
            )
        return process

    def engine_of(self, call: Call) -> LocalEngine:
        """The ready engine whose control process asks; raises `LocalError` when there is none."""
        process = self.process_of(call)
        engine = self._joined(process)
        if engine.lost:
            raise engine_lost()
        if engine.control is not process:
            raise _not_registered("this is not the control session")
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
            raise _not_here(engine_id, ErrorCode.ENGINE_UNKNOWN)
        engine.check_access(access)
        if not set(ranks) <= engine.ranks.keys():
            raise _not_here(engine_id, ErrorCode.ENGINE_NOT_READY)
        return engine

    def engine(self, engine_id: str, *, instance: str | None = None) -> LocalEngine:
        """The ready engine with that id, and instance if given; raises `LocalError` if none."""
        engine = self.engines.get(engine_id)
        if engine is None:
            raise _not_here(engine_id, ErrorCode.ENGINE_UNKNOWN)
        if not engine.ready:
            raise _not_here(engine_id, ErrorCode.ENGINE_NOT_READY)
        if instance not in (None, engine.instance):
            raise LocalError(
                f"engine '{engine_id}' came back as a new process", code=ErrorCode.STALE
            )
        return engine

    def register(self, wanted: Register, call: Call) -> None:
        """Answer once the memory is registered with NIXL."""
        process = self.process_of(call)
        engine = self._join(process, wanted)
        process.wants_fetched = wanted.notices
        if wanted.rank is None:
            engine.take_control(process, wanted.others)
            self._add(engine, process, call)
        else:
            step = partial(self._register_rank, engine, wanted.rank, wanted, process, call)
            self._tasks.start_soon(guarded, step, call.refuse)

    def await_ready(self, _: AwaitReady, call: Call) -> None:
        """Answer when the caller's engine is ready."""
        engine = self._joined(self.process_of(call))
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

    @property
    def _opened(self) -> Surroundings:
        if self._around is None:
            raise LocalError("the agent is starting", code=ErrorCode.BUSY)
        return self._around

    def _greet(self, connection: AttachConnection, hello: Hello) -> Message:
        around = self._opened
        if connection in self._by_connection or hello.boot in self._by_boot:
            raise LocalError("this boot id has said hello already", code=ErrorCode.ENGINE_CONFLICT)
        if around.server.sessions.has_ended(hello.boot):
            raise LocalError("this boot id was ended here: take a new one", code=ErrorCode.STALE)
        check_protocol(hello.min_protocol, hello.max_protocol)
        segments = self._new_segments(on_cut=partial(self._see_cut, connection))
        process = EngineProcess(hello.engine_id, hello.boot, connection, segments)
        self._by_connection[connection] = self._by_boot[hello.boot] = process
        log.info("engine.attached", engine_id=hello.engine_id, pid=connection.peer.pid)
        return around.identity

    def _greeted(self, connection: AttachConnection) -> EngineProcess:
        process = self._by_connection.get(connection)
        if process is None:
            raise _not_registered("say hello first")
        return process

    def _joined(self, process: EngineProcess) -> LocalEngine:
        if process.engine is None:
            raise _not_registered("register first")
        return process.engine

    def _join(self, process: EngineProcess, wanted: Register) -> LocalEngine:
        """The engine that the process wants to be of, and may; raises a `KVBusError`."""
        spec = wanted.engine
        validate_engine(spec)
        if spec.engine_id != process.engine_id:
            raise LocalError(f"hello said '{process.engine_id}', register '{spec.engine_id}'")
        if process.engine is not None:
            raise LocalError("this session is registered", code=ErrorCode.ENGINE_CONFLICT)
        engine = self.engines.get(spec.engine_id) or LocalEngine(spec)
        taken = engine.control if wanted.rank is None else engine.ranks.get(wanted.rank.rank)
        if engine.spec != spec or taken is not None:
            by = "with another spec" if engine.spec != spec else "by another process"
            raise LocalError(
                f"engine '{spec.engine_id}' is registered {by}",
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
        memory = await process.segments.register(rank)
        joined = self._join(process, wanted)  # another process may have come in between
        if process.gone or engine.lost:
            raise LocalError("the process ended", code=ErrorCode.ENGINE_LOST)
        joined.add_rank(memory, process.boot, wanted.access)
        self._add(joined, process, call)

    def _add(self, engine: LocalEngine, process: EngineProcess, call: Call) -> None:
        """The process is one of the engine, which may be ready by that."""
        self.engines[engine.engine_id] = engine
        engine.processes.add(process)
        process.engine = engine
        call.reply(Empty())
        if engine.ready:
            log.info("engine.ready", engine_id=engine.engine_id, engine_instance=engine.instance)
            self._publish("engine.ready", engine)
            self._opened.user.on_engine_ready(engine)
            waiting, engine.waiting = engine.waiting, []
            for one in waiting:
                one.reply(Empty())

    def _publish(self, op: str, engine: LocalEngine) -> None:
        self._opened.publisher.publish(op, EngineEvent(engine.engine_id, engine.instance))

    # Who touched the memory got zeros and goes on: a copy of ours that will be reported as done, or
    # a READ of a peer. The news was put into the loop before either, so the offers of the engine
    # have ended when somebody asks whether the zeros were any good.
    def _see_cut(self, connection: AttachConnection, segment_id: str) -> None:
        """The KV of an engine is gone, by its own doing."""
        process = self._by_connection.get(connection)
        if process is None or (process.engine is not None and process.engine.lost):
            return
        log.error("segment.cut", engine_id=process.engine_id, segment_id=segment_id)
        if process.engine is not None:
            self._lose(process.engine, meant=False)
        connection.hang_up()

    def _lose(self, engine: LocalEngine, *, meant: bool) -> None:
        if engine.lost:
            return
        engine.lost = True
        del self.engines[engine.engine_id]
        event = "engine.detached" if meant else "engine.lost"
        log.info(event, engine_id=engine.engine_id, engine_instance=engine.instance)
        for call in engine.waiting:
            call.refuse(engine_lost())
        self._publish("engine.lost", engine)
        self._opened.user.on_engine_lost(engine)
        self._tasks.start_soon(self._give_back, engine)

    async def _give_back(self, engine: LocalEngine) -> None:
        """The bytes of a lost engine now, so that its processes know; at last the addresses."""
        processes, user = list(engine.processes), self._opened.user
        for process in processes:
            await in_thread(process.segments.discard)
            process.connection.hang_up()
        await user.copied(engine)  # nothing but copies of ours touches unregistered memory
        await self._unmap(process for process in processes if not process.segments.direct)
        if engine.registrations:
            await user.quiesce(engine)
        await self._unmap(process for process in processes if process.segments.direct)

    # A reader that was stopped for longer than anybody waits for it has READs at UCX here, which go
    # on when it does. Over TCP UCX copies in this process, from addresses alone: where nothing is
    # mapped any more that ends the process, and where another engine's memory came to lie it sends
    # that. So the addresses that NIXL was told of stay what they are since the engine was lost,
    # zeros that take no memory. Only the oldest of very many go.
    async def _unmap(self, processes: Iterable[EngineProcess]) -> None:
        for process in processes:
            pages = process.segments.registered_pages()
            try:
                await process.segments.unmap()
                self._kept.extend(pages)
            except KVBusError as error:
                log.error("segment.kept", engine_id=process.engine_id, error=error.message)


def _not_registered(problem: str) -> LocalError:
    return LocalError(problem, code=ErrorCode.NOT_REGISTERED)


def _not_here(engine_id: str, code: ErrorCode) -> LocalError:
    return LocalError(f"engine '{engine_id}' is not here", code=code, engine_id=engine_id)
