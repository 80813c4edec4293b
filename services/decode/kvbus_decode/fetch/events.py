"""What can happen to fetches, and what the agent is told to do about it.

Refuses behaviour: these are values. `kvbus_decode.fetch.transitions` says which event leads
to which command. ``reply_to`` is what the agent uses to answer the request that caused an event.
"""

from collections.abc import Mapping
from hashlib import blake2b

from kvbus.errors import ErrorCode, KVBusError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Outcome, StageTimes
from kvbus.protocol.peer import Granted
from kvbus.protocol.rendezvous import Rendezvous
from kvbus.protocol.ticket import Ticket
from kvbus.table.events import (
    DeadlinePassed,
    DrainStarted,
    EngineLost,
    Refuse,
    SendReply,
    Stopped,
    Value,
)
from kvbus_decode.fetch.ahead import Ahead

__all__ = [
    "CancelRequested",
    "ChunkRead",
    "Command",
    "DeadlinePassed",
    "DrainStarted",
    "EngineLost",
    "Event",
    "FetchEvent",
    "HoldPeer",
    "LeaseConfirmed",
    "LeaseGranted",
    "OfferAdvanced",
    "OfferMet",
    "PeerGone",
    "PeerReady",
    "ReadChunk",
    "Refuse",
    "RenewFailed",
    "ReportBlocksFreed",
    "ReportFetched",
    "ReportLanded",
    "Requested",
    "ResolvePeer",
    "SendClaim",
    "SendConfirm",
    "SendForgo",
    "SendMeet",
    "SendRelease",
    "SendRenew",
    "SendReply",
    "SendTake",
    "SendWithdraw",
    "StepFailed",
    "StopRead",
    "Stopped",
    "TableEvent",
    "TurnCame",
]


class Requested(Value, frozen=True):
    """The engine asks for tokens [first_token, num_tokens) of the ticket's request.

    ``has_state`` when the engine has groups of opaque state: theirs is that of the last token, so
    it is read once the offer is sealed. ``zero_tail`` when it wants the unused slots of its last
    blocks zeroed. With ``chunk_tokens`` it wants chunks that end at multiples of it, and to be told
    of each that has landed; 0 without. ``route`` is how the prefill engine is read, None when that
    is not known yet and the peer has to be resolved, or when this agent is not ready to read.
    ``ahead`` when the route is known and the ticket's own blocks can be read at once. While it
    ``meets``, there is no ticket yet, and ``ticket`` says what is known of it; it is to be of the
    prompt with ``prompt_digest``. ``traceparent`` is what the engine said of the trace, ``asked_s``
    when it asked by its own word, and ``wanted_s`` since when it had the request. ``name`` is the
    engine's fetch id; those of two engines may be equal, which `fetch_key` tells apart.
    """

    fetch_id: str
    engine_id: str
    ticket: Ticket
    first_token: int
    num_tokens: int
    tables: Mapping[str, BlockTable]
    timeout_s: float
    reply_to: object
    has_state: bool = False
    zero_tail: bool = False
    chunk_tokens: int = 0
    route: object = None
    ahead: Ahead | None = None
    meets: Rendezvous | None = None
    prompt_digest: str = ""
    priority: int = 0
    traceparent: str = ""
    asked_s: float | None = None
    wanted_s: float | None = None
    name: str = ""


def fetch_key(engine_id: str, name: str) -> str:
    """What an agent calls a fetch that its engine calls ``name``: another for each engine."""
    return blake2b(f"{len(engine_id)} {engine_id} {name}".encode(), digest_size=16).hexdigest()


class OfferMet(Value, frozen=True):
    """The offer was made: this is its ticket."""

    fetch_id: str
    ticket: Ticket


class PeerReady(Value, frozen=True):
    """The prefill agent is connected and its engine fits ours."""

    fetch_id: str


class TurnCame(Value, frozen=True):
    """A place came free for a queued fetch; the table says so to itself."""

    fetch_id: str


class LeaseGranted(Value, frozen=True):
    """The reply to a claim or renewal that was sent at ``sent_at``: the lease counts from there.

    The reply to a claim brings the ticket: its lease is given back though its fetch be forgotten.
    """

    fetch_id: str
    sent_at: float
    granted: Granted
    claimed: Ticket | None = None


class StepFailed(Value, frozen=True):
    """A command of this fetch ended with an error: meet, resolve, claim, confirm or take.

    ``luck``, drawn from 0 to 1, lengthens the pause after ``busy``, so that agents that wait for
    the same thing do not ask in step.
    """

    fetch_id: str
    error: KVBusError
    luck: float = 0.0


class RenewFailed(Value, frozen=True):
    """A renewal ended with an error; a confirm of the same fetch may be under way by then.

    ``luck`` is as in `StepFailed`.
    """

    fetch_id: str
    error: KVBusError
    luck: float = 0.0


class OfferAdvanced(Value, frozen=True):
    """A hint that the offer has more tokens, or is sealed, or that its lease was revoked."""

    fetch_id: str


class ChunkRead(Value, frozen=True):
    """Nothing of the chunk is in flight any more; ``error`` is None when all bytes have landed.

    ``path`` names how they were read, empty when nothing was.
    """

    fetch_id: str
    num_bytes: int
    error: KVBusError | None = None
    path: str = ""


class LeaseConfirmed(Value, frozen=True):
    """The prefill agent says that what was read is good, after the last byte had landed."""

    fetch_id: str


class CancelRequested(Value, frozen=True):
    """The engine does not want the KV any more; with ``release_offer`` nobody does."""

    fetch_id: str
    reply_to: object
    release_offer: bool = False


class PeerGone(Value, frozen=True):
    """The process that the fetch reads from is gone, or has come back as another."""

    agent_boot: str


FetchEvent = (
    OfferMet
    | PeerReady
    | TurnCame
    | LeaseGranted
    | StepFailed
    | RenewFailed
    | OfferAdvanced
    | ChunkRead
    | LeaseConfirmed
    | CancelRequested
)
TableEvent = PeerGone | EngineLost | DrainStarted | Stopped | DeadlinePassed
Event = Requested | FetchEvent | TableEvent


class SendMeet(Value, frozen=True):
    """Ask for the ticket for so long; answer `OfferMet` or `StepFailed`."""

    fetch_id: str
    timeout_s: float
    requested: Requested


class SendForgo(Value, frozen=True):
    """Say that nobody will read the offer; the answer does not matter, as it ends by itself."""

    meets: Rendezvous


class ResolvePeer(Value, frozen=True):
    """Connect to the ticket's agent and shake hands; answer `PeerReady` or `StepFailed`."""

    fetch_id: str
    timeout_s: float
    requested: Requested


class HoldPeer(Value, frozen=True):
    """Keep what a fetch needs whose route is known; `StepFailed` if that is gone."""

    fetch_id: str
    requested: Requested


class SendClaim(Value, frozen=True):
    """Ask for the lease, by the route that it came with; answer `LeaseGranted` or `StepFailed`."""

    fetch_id: str
    timeout_s: float
    requested: Requested


class SendRenew(Value, frozen=True):
    """Ask for more time and for news; answer `LeaseGranted` or `RenewFailed`."""

    fetch_id: str
    epoch: int
    token: str
    timeout_s: float
    known_blocks: Mapping[str, int]


class ReadChunk(Value, frozen=True):
    """Read a chunk, tokens [start, stop), out of ``tables``; answer `ChunkRead`, once.

    Chunks of a fetch follow each other, one at a time. Groups of state are read with the ``last``
    one, which may have no tokens. Without a lease ``epoch`` is 0: nothing can be packed for it.
    """

    fetch_id: str
    epoch: int
    token: str
    tables: Mapping[str, BlockTable]
    start: int
    stop: int
    last: bool


class StopRead(Value, frozen=True):
    """Post nothing more of the chunk; `ChunkRead` follows when what was posted is terminal."""

    fetch_id: str


class SendConfirm(Value, frozen=True):
    """Ask whether the lease is live; answer `LeaseConfirmed` or `StepFailed`."""

    fetch_id: str
    epoch: int
    token: str
    timeout_s: float


class SendTake(Value, frozen=True):
    """Ask whether what was read of ``tables`` is good; answer `LeaseConfirmed` or `StepFailed`."""

    fetch_id: str
    tables: Mapping[str, BlockTable]
    timeout_s: float


class SendRelease(Value, frozen=True):
    """Give a lease back; the answer does not matter, the lease ends by itself as well."""

    ticket: Ticket
    epoch: int
    token: str
    code: ErrorCode


class SendWithdraw(Value, frozen=True):
    """End an offer that nobody will read; the answer does not matter, it ends by itself as well."""

    ticket: Ticket


class ReportLanded(Value, frozen=True):
    """Tell the engine that tokens up to here are in its blocks; not yet that they are valid."""

    fetch_id: str
    num_tokens: int


class ReportFetched(Value, frozen=True):
    """Tell the engine how the fetch ended; ``stage`` is the state that it ended in.

    ``num_bytes`` are those that have landed by then, ``path`` how the last of them were read.
    ``ahead`` when it was read before the lease, ``leased`` when it got one. ``undecided`` when the
    prefill agent was asked for its yes and did not answer: the offer may be completed.
    """

    fetch_id: str
    engine_id: str
    request_id: str
    outcome: Outcome
    stage: str
    blocks_free: bool
    num_bytes: int
    stages_s: StageTimes
    error: KVBusError | None = None
    path: str = ""
    ahead: bool = False
    leased: bool = False
    undecided: bool = False


class ReportBlocksFreed(Value, frozen=True):
    """Tell the engine that nothing writes into the blocks of an ended fetch any more."""

    fetch_id: str
    engine_id: str


Command = (
    SendReply
    | Refuse
    | SendMeet
    | SendForgo
    | ResolvePeer
    | HoldPeer
    | SendClaim
    | SendRenew
    | ReadChunk
    | StopRead
    | SendConfirm
    | SendTake
    | SendRelease
    | SendWithdraw
    | ReportLanded
    | ReportFetched
    | ReportBlocksFreed
)
