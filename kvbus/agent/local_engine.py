"""One local engine and its processes, as its agent sees them.

Refuses to decide who may register; that is the directory's.
"""

from dataclasses import dataclass, field

import structlog

from kvbus.agent.engine_memory import RankMemory, Segments
from kvbus.bus import Call, Session
from kvbus.errors import KVBusError
from kvbus.geometry import EngineSpec
from kvbus.memory.attach import AttachConnection
from kvbus.planning import PlacedRank
from kvbus.protocol.message import Message, to_body
from kvbus.protocol.peer import EngineMemory
from kvbus.transport import Registration

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class EngineProcess:
    """One process of an engine: its attach connection, its session, the segments it passed."""

    engine_id: str
    boot: str
    connection: AttachConnection
    segments: Segments = field(default_factory=Segments)
    session: Session | None = None
    engine: "LocalEngine | None" = None
    detaching: bool = False
    gone: bool = False


@dataclass(slots=True, eq=False)
class LocalEngine:
    """An engine: one control process, and one that holds the memory of each rank."""

    spec: EngineSpec
    control: EngineProcess | None = None
    ranks: dict[int, RankMemory] = field(default_factory=dict)
    processes: set[EngineProcess] = field(default_factory=set)
    waiting: list[Call] = field(default_factory=list)
    lost: bool = False

    @property
    def engine_id(self) -> str:
        """The id that the engine chose."""
        return self.spec.engine_id

    @property
    def boot(self) -> str:
        """The boot id of the control process stands for the engine; empty before it came."""
        return self.control.boot if self.control else ""

    @property
    def ready(self) -> bool:
        """Whether all of its processes are registered and alive."""
        return not self.lost and self.control is not None and len(self.ranks) == self.spec.tp_size

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
        """Blocks that every rank has for ``group``."""
        return min((rank.num_blocks[group] for rank in self.ranks.values()), default=0)

    def notify(self, notice: Message) -> None:
        """Tell the control process; one that does not take notices any more is sent away."""
        if self.lost or self.control is None or self.control.session is None:
            return
        try:
            self.control.session.notify(notice.op, to_body(notice))
        except KVBusError as error:
            log.error("engine.unresponsive", engine_id=self.engine_id, error=error.message)
            self.control.connection.hang_up()
