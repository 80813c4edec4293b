"""What can happen to fetches, and what the agent is told to do about it: values without behaviour.

``fetch_id`` is the key of a fetch, see `fetch_key`; ``reply_to`` is what the agent uses to answer
the request that caused an event.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import AgentRanks, BlocksFreed, Fetched, Landed, StartFetch
from kvbus.protocol.message import Message, Request
from kvbus.protocol.peer import Forgo, PeerWithdraw, Release
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


# Why bytes that were read without a lease can never be wrong tokens:
#
#     blocks   last write ───────────────────────────────────────── released, written again
#     ticket      └ names them ──▶
#     offer           sealed
#     fetch                        READ ──────────┤ last byte
#                                    claim ─▶ lease      take ─▶ yes
#
# The prefill engine writes to the blocks of an offer until the ticket names them, and again after
# the release. The take is sent after the last byte, and its yes says that the offer was
# sealed and live then and that these were its blocks: so the READ lies between the two. A lease
# adds nothing to the bytes. It keeps the offer from expiring under a long read, keeps other readers
# away, and makes the prefill agent drive what needs its progress. A yes ends the offer, so that of
# many readers one gets it. It is said again to the fetch that got it and to no other: to the one
# that shows its token, which is new for each fetch.
#
# An engine that names the blocks itself seals at the same moment, and the ticket may be faster than
# the seal. What the prefill agent says of an offer that is still open bears nothing out: a lease on
# it is kept, and no more. The tables are compared when it says that the offer is sealed, or by the
# take, which is refused before the seal and asked again.
@dataclass(frozen=True, slots=True)
class Ahead:
    """The offer's block tables, as the ticket names them.

    With ``claims`` the lease is asked for at once, beside the read; without, when the read takes
    long.
    """

    tables: Mapping[str, BlockTable]
    claims: bool


class Requested(Value, frozen=True):
    """What was ``asked`` for, with all that the agent knows of it.

    ``ticket`` is what was shown; before the fetch has met the offer of ``meets``, it says what is
    known of it. ``has_state`` when it wants groups of opaque state: theirs is that of the last
    token, so it is read once the offer is sealed. ``resources`` are what I/O needs of the fetch:
    the table passes them to each command, and looks at nothing in them. A fetch that ``has_route``
    need not shake hands; then ``boot``, ``elsewhere`` and ``nixl_agent`` are as in `PeerReady`.
    ``ahead`` when the ticket's own blocks can be read at once. With the ``take_token``, drawn for
    this fetch, a yes to its take is said again, and to no other. ``others`` are the agents that
    have other ranks of the engine. A part of another agent's fetch has the ``access`` to its
    engine, whose home is there.
    """

    fetch_id: str
    engine_id: str
    asked: StartFetch
    ticket: Ticket
    timeout_s: float
    reply_to: Any
    has_state: bool = False
    take_token: str = ""
    meets: Rendezvous | None = None
    others: tuple[AgentRanks, ...] = ()
    access: str = ""
    resources: Any = None
    has_route: bool = False
    boot: str = ""
    elsewhere: tuple[str, ...] = ()
    nixl_agent: str = ""
    ahead: Ahead | None = None

    @property
    def has_met(self) -> bool:
        return self.ticket.offer_id != UNKNOWN


def fetch_key(engine_id: str, name: str) -> str:
    """What an agent calls a fetch that its engine calls ``name``: another for each engine."""
    return blake2b(f"{len(engine_id)} {engine_id} {name}".encode(), digest_size=16).hexdigest()


class PeerReady(Value, frozen=True):
    """The prefill agent is connected and its engine fits ours.

    ``boot`` is the process that answered the handshake, and ``nixl_agent`` its NIXL agent.
    ``elsewhere`` stands for the memory of the engine's ranks at other agents.
    """

    fetch_id: str
    attempt: int
    boot: str
    elsewhere: tuple[str, ...] = ()
    nixl_agent: str = ""


class TurnCame(Value, frozen=True):
    """A place came free for a queued fetch; the table says so to itself."""

    fetch_id: str


class Answered(Value, frozen=True):
    """What became of an `Ask`: the reply to its ``message``, or the error in its place.

    The reply to `Meet` is a `Ticket` that may be used here. A lease counts from ``sent_at``.
    ``ticket`` is that of the fetch when it asked: a lease is given back though its fetch be
    forgotten. ``luck``, drawn from 0 to 1, lengthens the pause after ``busy``, so that agents that
    wait for the same thing do not ask in step.
    """

    fetch_id: str
    attempt: int
    message: Request[Any]
    outcome: Message | Ticket | KVBusError
    ticket: Ticket
    sent_at: float = 0.0
    luck: float = 0.0

    @property
    def error(self) -> KVBusError | None:
        """Why there is no reply that counts."""
        return self.outcome if isinstance(self.outcome, KVBusError) else None


class StepFailed(Value, frozen=True):
    """The attempt cannot go on: its peer is gone, was not found, or lost the memory to read."""

    fetch_id: str
    attempt: int
    error: KVBusError


class OfferAdvanced(Value, frozen=True):
    """A hint that the offer has more tokens, or is sealed, or that its lease was revoked."""

    fetch_id: str


class ReadEnded(Value, frozen=True):
    """Nothing of the chunk is in flight; ``error`` is None when all bytes have landed.

    ``path`` names how they were read, empty when nothing was, and ``nixl_agent`` the NIXL agent
    that they were read from, if any. ``elsewhere``: of the parts of other agents; their failure is
    a `StepFailed` before, or ``error`` where they were not asked.
    """

    fetch_id: str
    num_bytes: int = 0
    error: KVBusError | None = None
    path: str = ""
    elsewhere: bool = False
    nixl_agent: str = ""


class CancelRequested(Value, frozen=True):
    """The engine does not want the KV any more; with ``release_offer`` no other reader does.

    ``reply_to`` is None where no one asked: a part of another agent's fetch is answered by its end.
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
    """Ask the agent that the fetch holds; answer `Answered` or `StepFailed`, once."""

    requested: Requested
    attempt: int
    message: Request[Any]
    timeout_s: float


class Tell(Value, frozen=True):
    """Ask the agent of ``ticket`` to end something that is not needed any more.

    The answer does not matter: a lease and an offer end by themselves as well.
    """

    ticket: Ticket
    message: Release | PeerWithdraw | Forgo


class HoldPeer(Value, frozen=True):
    """Keep what the attempt needs of its agents; `StepFailed` if that fails."""

    requested: Requested
    attempt: int
    deadline: float


class FindRoute(HoldPeer, frozen=True):
    """Shake hands with the ticket's agent, too; answer `PeerReady` or `StepFailed`, once."""

    timeout_s: float


class ReadChunk(Value, frozen=True):
    """Read a chunk, tokens [start, stop), out of ``tables``; answer `ReadEnded`, once.

    Chunks of a fetch follow each other, one at a time. Groups of state are read with the ``last``
    one, which may have no tokens. Without a lease ``epoch`` is 0: nothing can be packed for it.
    """

    requested: Requested
    epoch: int
    token: str
    tables: Mapping[str, BlockTable]
    start: int
    stop: int
    last: bool


class AskOthers(Value, frozen=True):
    """Ask the other agents of the engine for their parts; answer `ReadEnded` elsewhere, once.

    If one fails, `StepFailed` before that.
    """

    requested: Requested
    attempt: int


class EndEarlierParts(Value, frozen=True):
    """End what earlier processes of this agent have asked other agents for, as of `AskOthers`.

    Answer `ReadEnded` elsewhere, once, when nothing of it is in flight.
    """

    requested: Requested


class EndAttempt(Value, frozen=True):
    """Give back what the attempt used, and do not use its route again.

    It failed by ``error``. Nothing of it is in flight. The next attempt follows, or the end.
    """

    requested: Requested
    attempt: int
    error: KVBusError


class StopReads(Value, frozen=True):
    """Begin nothing more of the chunk and of the parts; `ReadEnded` follows when all has ended."""

    fetch_id: str
    resources: Any = None


class Notify(Value, frozen=True):
    """Tell the engine: tokens are in its blocks, not yet valid; or an ended fetch writes no more.

    After `BlocksFreed` nothing follows.
    """

    requested: Requested
    message: Landed | BlocksFreed


class ReportFetched(Value, frozen=True):
    """A fetch has ended: ``fetched`` is the answer to its engine, and the record for all others.

    ``leased`` when it got a lease. ``undecided`` when the prefill agent was asked for its yes and
    did not answer: the offer may be completed.
    """

    requested: Requested
    fetched: Fetched
    leased: bool = False
    undecided: bool = False


Command = (
    SendReply
    | Refuse
    | Ask
    | Tell
    | HoldPeer
    | FindRoute
    | ReadChunk
    | AskOthers
    | EndEarlierParts
    | EndAttempt
    | StopReads
    | Notify
    | ReportFetched
)
