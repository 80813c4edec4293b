"""Events and commands of the fetch table; each ``fetch_id`` is a `fetch_key`."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from msgspec import structs

from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import AgentRanks, BlocksFreed, Fetched, Landed, StartFetch
from kvbus.protocol.message import Message, Request
from kvbus.protocol.peer import Decline, PeerWithdraw, Release
from kvbus.protocol.ticket import UNKNOWN, Rendezvous, Ticket, pooled_ticket
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
    Value,
)


# Why a read without a lease can never return wrong tokens:
#
#     blocks   last write ───────────────────────────────────────── released, written again
#     ticket      └ names them ──▶
#     offer           sealed
#     fetch                        READ ──────────┤ last byte
#                                    Acquire ─▶ lease    Commit ─▶ ok
#
# The prefill engine writes to the blocks of an offer until the ticket names them, and again after
# the release. The `Commit` is sent after the last byte. Its grant confirms that the offer was
# sealed and live at that time, with these blocks. So the READ lies between the two writes.
#
# A lease adds nothing to the validity of the bytes. It prevents the offer from expiring under a
# long read, keeps other readers away, and makes the prefill agent drive progress. The grant ends
# the offer, so only one of many readers gets it. Only the same fetch can get the grant again: it
# shows its token, which is new for each fetch.
#
# An engine that names the blocks itself seals at the same moment, and the ticket may arrive before
# the seal. A grant on an open offer confirms nothing, so the fetch only keeps the lease. The tables
# are compared with those of the first grant after the seal, or by the `Commit`. A `Commit` before
# the seal is refused, and sent again.
@dataclass(frozen=True, slots=True)
class SpeculativeRead:
    """Block tables from a ticket, for a read without a lease.

    With ``acquires``, `Acquire` is sent beside the read, not later.
    """

    tables: Mapping[str, BlockTable]
    acquires: bool


class PoolName(Value, frozen=True):
    """The pool with the blocks of a parked offer, which is read as an engine's memory.

    ``blocks`` and ``cell`` are as in a ticket, and absent from refusals.
    """

    engine_id: str
    engine_instance: str
    blocks: str = ""
    cell: int = 0

    @classmethod
    def of(cls, error: KVBusError) -> "PoolName | None":
        """Return the pool that a refusal names, if any."""
        if error.code is not ErrorCode.OFFER_PARKED:
            return None
        names = ("engine_id", "engine_instance")
        engine_id, instance = (error.detail.get(name) for name in names)
        is_named = isinstance(engine_id, str) and isinstance(instance, str)
        return cls(str(engine_id), str(instance)) if is_named else None

    def holds(self, ticket: Ticket) -> Ticket:
        return pooled_ticket(ticket, **structs.asdict(self))


class Requested(Value, frozen=True):
    """A request for a fetch.

    Until a ``rendezvous`` has a ticket, ``ticket`` has only its fields. A parked offer is read from
    its ``pool``. Only this fetch can repeat a granted `Commit` with ``commit_token``.
    ``rank_secret`` is a part's credential.
    """

    fetch_id: str
    engine_id: str
    request: StartFetch
    ticket: Ticket
    timeout_s: float
    reply_to: Any
    has_state: bool = False
    commit_token: str = ""
    rendezvous: Rendezvous | None = None
    pool: PoolName | None = None
    remote_ranks: tuple[AgentRanks, ...] = ()
    rank_secret: str = ""
    resources: Any = None
    has_route: bool = False
    boot: str = ""
    elsewhere: tuple[str, ...] = ()
    nixl_agent: str = ""
    speculative: SpeculativeRead | None = None

    @property
    def has_ticket(self) -> bool:
        return self.ticket.offer_id != UNKNOWN

    @property
    def source(self) -> Ticket:
        """The ticket, with the engine whose memory is read."""
        return self.ticket if self.pool is None else self.pool.holds(self.ticket)


def fetch_key(engine_id: str, name: str) -> str:
    return blake2b(f"{len(engine_id)} {engine_id} {name}".encode(), digest_size=16).hexdigest()


class PeerReady(Value, frozen=True):
    """The engine fits; ``elsewhere`` identifies memory and data processes at other agents."""

    fetch_id: str
    attempt: int
    boot: str
    elsewhere: tuple[str, ...] = ()
    nixl_agent: str = ""


class TurnCame(Value, frozen=True):
    fetch_id: str


class Answered(Value, frozen=True):
    """The reply to a `SendRequest` (to `AwaitOffer`: the ticket), or an error.

    A lease counts from ``sent_at``.
    """

    fetch_id: str
    attempt: int
    message: Request[Any]
    outcome: Message | Ticket | KVBusError
    ticket: Ticket
    sent_at: float = 0.0
    jitter: float = 0.0  # 0 to 1, so that agents do not retry in step

    @property
    def error(self) -> KVBusError | None:
        return self.outcome if isinstance(self.outcome, KVBusError) else None


class StepFailed(Value, frozen=True):
    """The attempt has failed: an error of a command, or a lost peer."""

    fetch_id: str
    attempt: int
    error: KVBusError


class OfferAdvanced(Value, frozen=True):
    """A hint: the offer or its lease has changed."""

    fetch_id: str


class ReadEnded(Value, frozen=True):
    """Nothing of the chunk is in flight; without ``error`` all bytes have landed.

    With ``elsewhere``, the parts of other agents have ended, after a `StepFailed` for each failed
    part.
    """

    fetch_id: str
    num_bytes: int = 0
    error: KVBusError | None = None
    path: str = ""
    elsewhere: bool = False
    nixl_agent: str = ""


class CancelRequested(Value, frozen=True):
    fetch_id: str
    reply_to: object | None  # None for a part: its end is the reply
    release_offer: bool = False


FetchEvent = (
    Answered | PeerReady | TurnCame | StepFailed | OfferAdvanced | ReadEnded | CancelRequested
)
TableEvent = EngineLost | DrainStarted | Stopped | DeadlinePassed
Event = Requested | FetchEvent | TableEvent


# SendRequest, FindRoute, ReadChunk, RequestRemoteParts and EndEarlierParts get exactly one answer.


class SendRequest(Value, frozen=True):
    requested: Requested
    attempt: int
    message: Request[Any]
    timeout_s: float


class NotifyAgent(Value, frozen=True):
    """End a lease or an offer; the reply is ignored, as both expire."""

    ticket: Ticket
    message: Release | PeerWithdraw | Decline


class AcquirePeer(Value, frozen=True):
    """Acquire the peers of the attempt; `StepFailed` if that fails."""

    requested: Requested
    attempt: int
    deadline: float


class FindRoute(AcquirePeer, frozen=True):
    timeout_s: float


class ReadChunk(Value, frozen=True):
    """Read the tokens [start, stop).

    The ``last`` chunk reads the state, and may have no tokens.
    """

    requested: Requested
    epoch: int  # 0 without a lease
    token: str
    tables: Mapping[str, BlockTable]
    start: int
    stop: int
    last: bool
    after: int = 0  # GPU work that other agents of the prefill engine wait for


class RequestRemoteParts(Value, frozen=True):
    requested: Requested
    attempt: int


class EndEarlierParts(Value, frozen=True):
    requested: Requested


class EndAttempt(Value, frozen=True):
    """Release the resources of a failed attempt; nothing is in flight."""

    requested: Requested
    attempt: int
    error: KVBusError


class StopReads(Value, frozen=True):
    """Start no further transfer; `ReadEnded` follows."""

    fetch_id: str
    resources: Any = None


class NotifyEngine(Value, frozen=True):
    """Notify the engine of landed tokens, not yet valid, or of its freed blocks."""

    requested: Requested
    message: Landed | BlocksFreed


class ReportFetched(Value, frozen=True):
    """Report an ended fetch; if ``undecided``, a `Commit` got no reply."""

    requested: Requested
    fetched: Fetched
    leased: bool = False
    undecided: bool = False


Command = (
    SendReply
    | Refuse
    | SendRequest
    | NotifyAgent
    | AcquirePeer
    | FindRoute
    | ReadChunk
    | RequestRemoteParts
    | EndEarlierParts
    | EndAttempt
    | StopReads
    | NotifyEngine
    | ReportFetched
)
