"""One local engine and its processes, as its agent sees them."""

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from kvbus.agent.engines.rank_memory import RankMemory, Segments
from kvbus.bus import Call, Session, new_secret
from kvbus.bus.session import OnTold
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.geometry import EngineSpec, RankSpec, validate_ranks
from kvbus.memory.attach import AttachConnection
from kvbus.planning import PlacedRank
from kvbus.protocol.engine import AgentRanks, Replaced
from kvbus.protocol.envelope import Body
from kvbus.protocol.message import Message, to_body
from kvbus.protocol.peer import EngineMemory
from kvbus.protocol.rights import check_right
from kvbus.transport import Registration

log = structlog.get_logger()

MAX_BLOCK_ID = 2**32 - 1


@dataclass(slots=True, eq=False)
class EngineProcess:
    """One process of an engine: its attach connection, its session, the segments it passed."""

    engine_id: str
    boot: str
    connection: AttachConnection
    segments: Segments = field(default_factory=Segments)
    session: Session | None = None
    engine: "LocalEngine | None" = None
    wants_notices: bool = False
    follows: bool = False
    detaching: bool = False
    gone: bool = False

    def notify(self, op: str, body: Body, on_told: OnTold | None = None) -> None:
        """Tell the process; one that does not take notices any more is sent away."""
        try:
            if self.session is not None:
                self.session.notify(op, body, on_told)
        except KVBusError as error:
            log.error("engine.unresponsive", engine_id=self.engine_id, error=error.message)
            self.connection.hang_up()

    def send_on(self) -> None:
        """Tell it that its agent is replaced, if it has registered and follows."""
        if self.follows and self.engine is not None:
            self.notify(Replaced.op, to_body(Replaced()))


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
    memory_id: str = field(init=False)
    """Stands for the processes that hold the ranks here: a rank that came back is another."""
    instance: str = ""
    """Stands for the control process, and may be told to anybody; empty before that came.

    Its boot id may not: on the engine socket that is who it is.
    """
    processes: set[EngineProcess] = field(default_factory=set)
    waiting: list[Call] = field(default_factory=list)
    lost: bool = False
    _accesses: list[str] = field(default_factory=list, repr=False)
    _rank_boots: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory_id = _memory_id({})

    @property
    def engine_id(self) -> str:
        """The id that the engine chose."""
        return self.spec.engine_id

    def take_control(self, process: EngineProcess, others: tuple[AgentRanks, ...]) -> None:
        """This is the engine's home from now on; every time that is another instance."""
        self.control, self.others = process, others
        self.instance = uuid.uuid4().hex
        self._accesses.append(new_secret())

    @property
    def access(self) -> str:
        """What is shown to ask about the memory here; empty while nobody may."""
        return self._accesses[0] if self._accesses else ""

    def check_access(self, shown: str | None) -> None:
        """Raise `LocalError` (``forbidden``) unless ``shown`` gives access to the memory here."""
        check_right(shown, *self._accesses)

    def add_rank(self, memory: RankMemory, boot: str, access: str | None) -> None:
        """The process ``boot`` has registered a rank; who shows ``access`` may ask about it."""
        if access is not None:
            self._accesses.append(access)
        self.ranks[memory.rank.rank] = memory
        self._rank_boots[memory.rank.rank] = boot
        self.memory_id = _memory_id(self._rank_boots)

    @property
    def ready(self) -> bool:
        """Whether this is its home, and all of its processes here are registered and alive."""
        return not self.lost and self.control is not None and self.num_missing_ranks == 0

    @property
    def stays_because(self) -> str:
        """Why it cannot go over to a successor of its agent; empty when it can."""
        if self.control is None or self.others:
            return "some of its ranks are at other agents, which know this one by its address"
        if not all(process.follows for process in self.processes):
            return "its sessions do not follow to a successor (reconnect=True does)"
        return ""

    @property
    def num_missing_ranks(self) -> int:
        """Ranks that are neither here nor at one of the others."""
        known = self.ranks.keys() | {rank for other in self.others for rank in other.ranks}
        return self.spec.num_ranks - len(known)

    @property
    def devices(self) -> set[str]:
        """Where the memory of the ranks here is."""
        return {rank.device for rank in self.ranks.values()}

    @property
    def registrations(self) -> list[Registration]:
        """All memory of the engine, as NIXL knows it."""
        return [reg for rank in self.ordered_ranks() for reg in rank.registrations]

    def check_others(self, others: Iterable[AgentRanks]) -> None:
        """Raise `GeometryError` unless ``others`` have each rank once, and leave one to be here."""
        others = tuple(others)
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
            raise GeometryError(f"engine '{self.engine_id}': {problem}", field="others")

    def check_rank_is_here(self, rank: int) -> None:
        """Raise `GeometryError` if the control session said that ``rank`` is elsewhere."""
        for other in self.others:
            if rank in other.ranks:
                raise GeometryError(
                    f"engine '{self.engine_id}': its control session said that rank {rank} is at "
                    f"{other.endpoint}",
                    field="rank",
                )

    def check_whole(self, rank: RankSpec | None = None) -> None:
        """Raise `GeometryError` if the ranks, now that the last one comes, do not hold all KV."""
        ranks = [memory.rank for memory in self.ranks.values()] + ([rank] if rank else [])
        if len(ranks) == self.spec.num_ranks:
            validate_ranks(self.spec, ranks)

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

    def notify(self, notice: Message, on_told: OnTold | None = None) -> None:
        """Tell the control process, for which ``on_told`` is, and those that asked for it."""
        if self.lost or self.control is None:
            return
        body = to_body(notice)
        for process in [each for each in self.processes if each.wants_notices]:
            is_control = process is self.control
            process.notify(notice.op, body, on_told if is_control else None)


def _memory_id(rank_boots: Mapping[int, str]) -> str:
    boots = "".join(f"{rank}:{boot};" for rank, boot in sorted(rank_boots.items()))
    return blake2b(boots.encode(), digest_size=16).hexdigest()


def not_here(engine_id: str, code: ErrorCode) -> LocalError:
    """Why an engine that is asked for by name cannot be used."""
    return LocalError(f"engine '{engine_id}' is not here", code=code, engine_id=engine_id)


def engine_lost() -> LocalError:
    """Why what is done for an engine fails once one of its processes ended."""
    return LocalError("a process of this engine ended", code=ErrorCode.ENGINE_LOST)
