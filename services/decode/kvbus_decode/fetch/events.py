"""Events and commands of the fetch table: values without behaviour.

``fetch_id`` is a `fetch_key`; ``reply_to`` is the handle to reply to a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import AgentRanks, BlocksFreed, Fetched, Landed, StartFetch
from kvbus.protocol.message import Message, Request
from kvbus.protocol.peer import Decline, PeerWithdraw, Release
from kvbus.protocol.ticket import UNKNOWN, Rendezvous, Ticket
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
    """Block tables of an offer, from its ticket, for a read without a lease.

    With ``acquires`` the `Acquire` is sent beside the read; otherwise only if the read takes long.
    """

    tables: Mapping[str, BlockTable]
    acquires: bool


class Requested(Value, frozen=True):
    """A request for a fetch, and what the agent knows at its start.

    Until the ``rendezvous`` has a ticket, ``ticket`` has only its fields. ``has_state`` for
    state of the last token, which is read after the seal. The table only passes on ``resources``.
    With ``has_route`` no handshake is needed: ``boot``, ``elsewhere`` and ``nixl_agent`` are as in
    `PeerReady`. Only this fetch can repeat a granted `Commit` with ``commit_token``. ``others``
    have other ranks of the engine. ``access`` is the credential of a part.
    """

    fetch_id: str
    engine_id: str
    asked: StartFetch
    ticket: Ticket
    timeout_s: float
    reply_to: Any
    has_state: bool = False
    commit_token: str = ""
    rendezvous: Rendezvous | None = None
    others: tuple[AgentRanks, ...] = ()
    access: str = ""
    resources: Any = None
    has_route: bool = False
    boot: str = ""
    elsewhere: tuple[str, ...] = ()
    nixl_agent: str = ""
    speculative: SpeculativeRead | None = None

    @property
    def has_ticket(self) -> bool:
        return self.ticket.offer_id != UNKNOWN


def fetch_key(engine_id: str, name: str) -> str:
    """Return the key of the fetch that an engine calls ``name``; unique per engine."""
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
    """The result of an `Ask`: the reply (to `AwaitOffer`: the ticket), or an error.

    A lease counts from ``sent_at``. A lease of a forgotten fetch is released by ``ticket``.
    ``jitter``, 0 to 1, lengthens the pause after ``busy``, so that agents do not retry in step.
    """

    fetch_id: str
    attempt: int
    message: Request[Any]
    outcome: Message | Ticket | KVBusError
    ticket: Ticket
    sent_at: float = 0.0
    jitter: float = 0.0

    @property
    def error(self) -> KVBusError | None:
        return self.outcome if isinstance(self.outcome, KVBusError) else None


class StepFailed(Value, frozen=True):
    """The attempt has failed: its peer is lost or not found, or lost the memory."""

    fetch_id: str
    attempt: int
    error: KVBusError


class OfferAdvanced(Value, frozen=True):
    """A hint that the offer has grown or is sealed, or that its lease was revoked."""

    fetch_id: str


class ReadEnded(Value, frozen=True):
    """Nothing of the chunk is in flight; without ``error`` all bytes have landed.

    With ``elsewhere`` it is about the parts of other agents: a failed part is a `StepFailed`
    before, or ``error`` if none was requested. ``path`` and ``nixl_agent`` are empty if unused.
    """

    fetch_id: str
    num_bytes: int = 0
    error: KVBusError | None = None
    path: str = ""
    elsewhere: bool = False
    nixl_agent: str = ""


class CancelRequested(Value, frozen=True):
    """The engine cancels the fetch; with ``release_offer`` no other reader wants the KV.

    ``reply_to`` is None for a part: its end is the reply.
    """

    fetch_id: str
    reply_to: object | None
    release_offer: bool = False


FetchEvent = (
    Answered | PeerReady | TurnCame | StepFailed | OfferAdvanced | ReadEnded | CancelRequested
)
TableEvent = EngineLost | DrainStarted | Stopped | DeadlinePassed
Event = Requested | FetchEvent | TableEvent


class Ask(Value, frozen=True):
    """Send a request; answered once, by `Answered` or `StepFailed`."""

    requested: Requested
    attempt: int
    message: Request[Any]
    timeout_s: float


class NotifyAgent(Value, frozen=True):
    """Have an agent end a lease or an offer; the reply is ignored, as both expire."""

    ticket: Ticket
    message: Release | PeerWithdraw | Decline


class AcquirePeer(Value, frozen=True):
    """Acquire the peers of the attempt; `StepFailed` if that fails."""

    requested: Requested
    attempt: int
    deadline: float


class FindRoute(AcquirePeer, frozen=True):
    """Acquire the peers and shake hands; answered once, by `PeerReady` or `StepFailed`."""

    timeout_s: float


class ReadChunk(Value, frozen=True):
    """Read the tokens [start, stop) from ``tables``; answered once, by `ReadEnded`.

    The ``last`` one reads the state, and may have no tokens. Without a lease ``epoch`` is 0, and
    the prefill agent packs nothing.
    """

    requested: Requested
    epoch: int
    token: str
    tables: Mapping[str, BlockTable]
    start: int
    stop: int
    last: bool


class AskOthers(Value, frozen=True):
    """Request the parts from the other agents of the engine.

    Answered once, by `ReadEnded`, after a `StepFailed` for each failed part.
    """

    requested: Requested
    attempt: int


class EndEarlierParts(Value, frozen=True):
    """End the parts that earlier processes of this agent requested; answered by `ReadEnded`."""

    requested: Requested


class EndAttempt(Value, frozen=True):
    """Release what a failed attempt holds; nothing of it is in flight."""

    requested: Requested
    attempt: int
    error: KVBusError


class StopReads(Value, frozen=True):
    """Start no further transfer of the chunk and the parts; `ReadEnded` follows."""

    fetch_id: str
    resources: Any = None


class NotifyEngine(Value, frozen=True):
    """Notify the engine of tokens in its blocks, not yet valid, or, last, of its freed blocks."""

    requested: Requested
    message: Landed | BlocksFreed


class ReportFetched(Value, frozen=True):
    """The report of a fetch that has ended.

    ``undecided`` if a `Commit` got no reply: the offer may be completed.
    """

    requested: Requested
    fetched: Fetched
    leased: bool = False
    undecided: bool = False


Command = (
    SendReply
    | Refuse
    | Ask
    | NotifyAgent
    | AcquirePeer
    | FindRoute
    | ReadChunk
    | AskOthers
    | EndEarlierParts
    | EndAttempt
    | StopReads
    | NotifyEngine
    | ReportFetched
)
