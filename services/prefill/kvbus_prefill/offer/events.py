"""Events and commands of the offer table."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from kvbus.errors import ErrorCode
from kvbus.fair import Tenant
from kvbus.geometry import BlockTable
from kvbus.protocol.commit_cell import CommitCell
from kvbus.protocol.engine import EndedOffer, MakeOffer, Released
from kvbus.protocol.message import Message
from kvbus.protocol.peer import KeepOffers
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.tools import OfferEvent
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
    Value,
)

M = TypeVar("M", bound=Message)


class RequestReceived(Value, Generic[M], frozen=True):
    """Request of a local engine (``engine_id``), or of a reader with the CURVE key ``holder``.

    ``fresh`` is a secret for a new lease or offer.
    """

    message: M
    reply_to: object
    engine_id: str = ""
    holder: str = ""
    fresh: str = ""


class Opened(Value, frozen=True):
    """Offer of an engine, with checked tables.

    The engine may append ``ticket_blocks`` of its blocks to the ticket.
    """

    message: MakeOffer
    reply_to: object
    ticket: Ticket
    ttl_s: float
    ticket_blocks: int = 0
    cell: CommitCell | None = None


class KeepRequested(Value, frozen=True):
    """Request of a reader's agent; ``may_come``: an engine may still publish unknown offers."""

    message: KeepOffers
    reply_to: object
    tenant: Tenant
    may_come: bool


class Restored(Value, frozen=True):
    """Completed offer of an earlier agent process, which its engine publishes again."""

    engine_id: str
    ended: EndedOffer


class Pooled(Value, frozen=True):
    """Blocks of a pool with a copy of an offer's blocks; ``place`` is the pool's own name of them.

    The pool is to readers an engine with ``engine_id`` and ``engine_instance``. ``blocks`` and
    ``cell`` are as in a ticket.
    """

    engine_id: str
    engine_instance: str
    tables: Mapping[str, BlockTable]
    num_bytes: int
    place: Any
    blocks: str = ""
    cell: int = 0

    @property
    def names(self) -> dict[str, Any]:
        """What a reader must know of the pool, by field of its ticket."""
        fields = ("engine_id", "engine_instance", "blocks", "cell")
        return {name: getattr(self, name) for name in fields}


class Copied(Value, frozen=True):
    """An offer's blocks are in the pool. `FreePooled` follows now, or at the end of the offer."""

    offer_id: str
    pooled: Pooled
    cell: CommitCell | None = None


class CellCommitted(Value, frozen=True):
    offer_id: str
    token: str = ""


class CellsChecked(Value, frozen=True):
    """Check of all cells, for commits whose reports were lost."""


class CellsRevoked(Value, frozen=True):
    """Revocation of a reader that can write to the engine's cells."""

    engine_id: str


class Abandoned(Value, frozen=True):
    """End of a reader's wait for a name."""

    transfer_id: str
    reply_to: object


class EngineReady(Value, frozen=True):
    """An engine is ready."""


class EnginesGone(Value, frozen=True):
    """No engine is ready: the last one is lost, or none has come."""


Event = (
    RequestReceived[Any]
    | Opened
    | KeepRequested
    | Restored
    | Copied
    | CellCommitted
    | CellsChecked
    | CellsRevoked
    | Abandoned
    | EngineReady
    | EnginesGone
    | EngineLost
    | DrainStarted
    | Stopped
    | DeadlinePassed
)


class ReportReleased(Value, frozen=True):
    """Command: report the end of an offer; that of a parked one is not reported to its engine."""

    engine_id: str
    released: Released
    num_tokens: int
    opened_at: float
    was_parked: bool = False


class ReportParked(Value, frozen=True):
    engine_id: str
    released: Released
    pooled: Pooled
    sealed_at: float


class FreePooled(Value, frozen=True):
    pooled: Pooled


class ParkSoon(Value, frozen=True):
    """Command: park an offer as soon as possible."""

    offer_id: str


class Publish(Value, frozen=True):
    op: str
    body: OfferEvent


class BeginLease(Value, frozen=True):
    offer_id: str
    epoch: int


class EndLease(Value, frozen=True):
    """Command: end a lease; ``code`` is for its reader."""

    offer_id: str
    epoch: int
    reason: str
    code: ErrorCode


Command = (
    SendReply
    | Refuse
    | ReportReleased
    | ReportParked
    | FreePooled
    | ParkSoon
    | Publish
    | BeginLease
    | EndLease
)
Commands = list[Command]
