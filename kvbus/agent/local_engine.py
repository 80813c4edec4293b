"""A local engine: it is lost as a whole when any of its processes ends."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from kvbus.agent.segments import RegisteredRank, Segments
from kvbus.bus import Call, Session, new_secret
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import EngineSpec, RankSpec, validate_ranks
from kvbus.memory.attach import AttachConnection
from kvbus.memory.mapping import CellsPage
from kvbus.protocol.engine import NUM_SEQUENCE_WORDS, AgentRanks, Register
from kvbus.protocol.message import Message, check_right
from kvbus.protocol.peer import EngineMemory

log = structlog.get_logger()

MAX_BLOCK_ID = 2**32 - 1


@dataclass(slots=True, eq=False)
class EngineProcess:
    engine_id: str
    boot: str
    connection: AttachConnection
    segments: Segments
    session: Session | None = None
    engine: LocalEngine | None = None
    memory: str = ""
    detaching: bool = False
    gone: bool = False

    def open(self, session: Session) -> None:
        self.session = session
        session.pinned, session.on_unread = True, self._send_away

    def notify(self, notice: Message) -> None:
        if self.session is not None:
            self.session.notify(notice.op, notice)

    def _send_away(self) -> None:
        if not self.gone and not self.detaching:
            log.error("engine.unresponsive", engine_id=self.engine_id)
            self.connection.shut_down()


@dataclass(slots=True, eq=False)
class LocalEngine:
    """The agent of its control process is its home; ``remote_ranks`` have ranks elsewhere.

    A pool is memory of the agent itself, without a process.
    """

    spec: EngineSpec
    control: EngineProcess | None = None
    is_pool: bool = False
    remote_ranks: tuple[AgentRanks, ...] = ()
    ranks: dict[int, RegisteredRank] = field(default_factory=dict)
    memory_id: str = ""
    instance: str = ""
    """Public name of the control session; the boot id of that process is secret."""
    republishes: bool = False
    num_missing_ranks: int = field(init=False)
    processes: list[EngineProcess] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)
    lost: bool = False
    shares_cells: bool = True
    """False after a reader lost its right to the page of cells."""
    _rank_secrets: list[str] = field(default_factory=list, repr=False)
    _memories: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_missing_ranks = self.spec.num_ranks

    @property
    def engine_id(self) -> str:
        return self.spec.engine_id

    @property
    def is_home(self) -> bool:
        """Whether its offers are made at this agent."""
        return self.control is not None or self.is_pool

    @property
    def is_whole(self) -> bool:
        return self.is_home and not self.num_missing_ranks and not self.lost

    @property
    def ready(self) -> bool:
        return self.is_whole and not self.republishes

    @property
    def memory_name(self) -> str:
        """Name of the ranks' memory that survives a restart of this agent."""
        names = " ".join(f"{number}={name}" for number, name in sorted(self._memories.items()))
        return blake2b(names.encode(), digest_size=16).hexdigest()

    @property
    def rank_secret(self) -> str:
        return self._rank_secrets[0] if self._rank_secrets else ""

    def check_rank_secret(self, shown: str | None) -> None:
        check_right(shown, *self._rank_secrets)

    @property
    def devices(self) -> set[str]:
        return {rank.device for rank in self.ranks.values()}

    @property
    def is_direct(self) -> bool:
        return any(rank.direct for rank in self.ranks.values())

    @property
    def cells(self) -> CellsPage | None:
        """None unless one process has all ranks."""
        pages = (rank.cells for rank in self.ranks.values() if self.shares_cells)
        return next((page for page in pages if page is not None), None)

    def has_reached(self, number: int) -> bool:
        """Return whether all ranks here have; raises `LocalError` if one has passed no page."""
        without = [name for name, rank in self.ranks.items() if rank.sequence is None]
        if without:
            raise LocalError(
                f"'after' is {number}, but rank {without[0]} of engine '{self.engine_id}' has "
                "passed no page of sequence words: pass a segment of kind 'sequence' before "
                "'register'",
                code=ErrorCode.SEGMENT,
            )
        return self.sequence_at(number % NUM_SEQUENCE_WORDS) >= number

    def sequence_at(self, word: int) -> int:
        pages = [rank.sequence for rank in self.ranks.values()]
        return min((page[word] for page in pages if page is not None), default=0)

    def check_memory(self) -> None:
        for process in list(self.processes):
            process.segments.find_cuts()
        if self.lost:
            raise engine_lost()

    def memory(self) -> EngineMemory:
        return EngineMemory(
            engine=self.spec,
            ranks=tuple(rank.rank for rank in self.ranks.values()),
            addresses=tuple(rank.addresses for rank in self.ranks.values()),
        )

    def num_blocks(self, group: str) -> int:
        """Return the smallest count; `MAX_BLOCK_ID` + 1 if no rank has the group."""
        held = [rank.num_blocks[group] for rank in self.ranks.values() if group in rank.num_blocks]
        return min(held, default=MAX_BLOCK_ID + 1)

    def notify(self, notice: Message) -> None:
        if not self.lost and self.control is not None:
            self.control.notify(notice)

    @classmethod
    def new_pool(cls, spec: EngineSpec, ranks: Iterable[RegisteredRank]) -> LocalEngine:
        pool = cls(spec, is_pool=True, instance=uuid.uuid4().hex)
        pool._rank_secrets.append(new_secret())
        for memory in ranks:
            pool.add_rank(memory, None, pool.instance)
        return pool

    def take_control(self, process: EngineProcess, wanted: Register) -> None:
        self._check_remote_ranks(wanted.remote_ranks)
        self._check_whole()
        self.control, self.remote_ranks = process, wanted.remote_ranks
        self._count_missing()
        self.instance = wanted.instance or uuid.uuid4().hex
        self.republishes = wanted.republishes
        self._rank_secrets.append(new_secret())

    def add_rank(self, memory: RegisteredRank, rank_secret: str | None, name: str) -> None:
        number = memory.rank.rank
        for other in self.remote_ranks:
            if number in other.ranks:
                raise self._refusal(
                    f"its control session listed rank {number} at {other.endpoint}", "rank"
                )
        self._check_whole(memory.rank)
        if rank_secret is not None:
            self._rank_secrets.append(rank_secret)
        self._memories[number] = name
        self.ranks = dict(sorted([*self.ranks.items(), (number, memory)]))
        self.memory_id = uuid.uuid4().hex
        self._count_missing()

    def _count_missing(self) -> None:
        elsewhere = sum(len(other.ranks) for other in self.remote_ranks)  # each is named once
        self.num_missing_ranks = self.spec.num_ranks - elsewhere - len(self.ranks)

    def _check_whole(self, *more: RankSpec) -> None:
        ranks = [*(memory.rank for memory in self.ranks.values()), *more]
        if len(ranks) == self.spec.num_ranks:
            validate_ranks(self.spec, ranks)

    def _check_remote_ranks(self, remote_ranks: tuple[AgentRanks, ...]) -> None:
        named = Counter(rank for other in remote_ranks for rank in other.ranks)
        named.update(self.ranks.keys())
        twice, problem = [rank for rank, times in named.items() if times > 1], ""
        if twice:
            problem = f"rank {min(twice)} is named twice, or at two agents"
        elif len({other.endpoint for other in remote_ranks}) != len(remote_ranks):
            problem = "an agent is named twice"
        elif max(named, default=0) >= self.spec.num_ranks:
            problem = f"rank {max(named)} of {self.spec.num_ranks} ranks"
        elif len(named) - len(self.ranks) >= self.spec.num_ranks:
            problem = "no rank is at the engine's home"
        if problem:
            raise self._refusal(problem, "remote_ranks")

    def _refusal(self, problem: str, named: str) -> GeometryError:
        return GeometryError(f"engine '{self.engine_id}': {problem}", field=named)


def engine_lost() -> LocalError:
    return LocalError("a process of this engine ended", code=ErrorCode.ENGINE_LOST)
