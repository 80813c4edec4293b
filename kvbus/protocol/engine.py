"""Messages on the engine socket."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvbus.geometry import BlockTable, EngineSpec, RankSpec
from kvbus.geometry.spec import Index
from kvbus.protocol.message import (
    OFFER_ENDED,
    Empty,
    Endpoint,
    FetchId,
    Id,
    Message,
    OfferId,
    Priority,
    Readers,
    Redacted,
    Request,
    Seconds,
    Secret,
    SequenceNumber,
    ServerKey,
    Size,
    Socket,
    Text,
    Tokens,
    notice,
    request,
)

Tables = Annotated[dict[Id, BlockTable], msgspec.Meta(max_length=64)]
Ranks = Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=1024)]
CellName = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Clock = float
"""Time of the engine's first request for this, by ``CLOCK_MONOTONIC``; ignored if in the future, or
over an hour ago."""
CommitMark = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Commits = Annotated[tuple[CommitMark, ...], msgspec.Meta(max_length=2048)]
"""[Marks](#publish-again), one for each reader."""
SEQUENCE_BYTES = 4096
"""A page of sequence words, each of 64 bits in native byte order."""
NUM_SEQUENCE_WORDS = SEQUENCE_BYTES // 8
ORDERED = "segment timeout"
"""Refusals of a request with ``after``."""
MAX_ENDED = 1024
"""Offers in one ``republished``: the most recently committed ones."""


class AgentRole(StrEnum):
    """Side of a handoff that the agent serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """Final state of an offer or a fetch."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    PARKED = "parked"


class Park(StrEnum):
    """When the agent [parks](protocol-engine.md#park-an-offer) an offer."""

    NEVER = "never"
    WHEN_FULL = "when_full"
    """After the agent's ``park_after_s``, or while the engine runs short of blocks."""
    ALWAYS = "always"
    """As soon as the offer is sealed."""


class AgentRanks(Redacted, frozen=True):
    """Ranks of an engine that are attached to another agent."""

    endpoint: Endpoint
    ranks: Ranks
    rank_secret: Secret
    """The same as in ``register`` of these ranks."""
    server_key: ServerKey = ""


@request(
    "register",
    Socket.ENGINE,
    refusals="not_registered engine_conflict engine_lost geometry segment draining config",
)
class Register(Request[Empty], frozen=True):
    """Register this session, once: with ``rank`` a memory session, without it the control
    session.
    """

    engine: EngineSpec
    """The same in all sessions."""
    rank: RankSpec | None = None
    remote_ranks: Annotated[tuple[AgentRanks, ...], msgspec.Meta(max_length=1024)] = ()
    """Control session only: ranks at other agents; at least one is here."""
    rank_secret: Secret | None = None
    """Memory session away from the home only: the right to use its ranks, 128 random bits, the same
    in all sessions at one agent."""
    role: AgentRole | None = None
    """An agent of the other role refuses it (``config``)."""
    instance: Text = ""
    """Random name of the session for [publishing again](#publish-again), the same at each
    registration by this process."""
    republishes: bool = False
    """Control session at a prefill agent only: its offers are [published again](#publish-again).
    Until ``republished``, readers are refused with ``engine_not_ready``."""


class RanksReady(Message, frozen=True):
    memory: Id
    """Id of the ranks' memory at this agent. A new id means that offers of the old memory are lost.
    """


@request("ready", Socket.ENGINE, refusals="not_registered engine_lost")
class AwaitReady(Request[RanksReady], frozen=True):
    """Wait until the control session and all ranks, except for remote ones, are registered."""


@request("detach", Socket.ENGINE, refusals="not_registered")
class Detach(Request[Empty], frozen=True):
    """End this session, and with it [the whole engine](#when-the-attach-connection-ends). Close the
    attach connection after the reply.
    """


@request("ping", Socket.ENGINE)
class Ping(Request[Empty], frozen=True):
    """Check that the agent is alive."""


class OfferMade(Message, frozen=True):
    offer_id: Id
    ticket: dict[str, Any]
    """[Ticket](#ticket). Pass it on unchanged, except for ``ticket_blocks``."""
    ticket_blocks: Size = 0
    """Open offers only: number of blocks that the engine may [name in the ticket](#prefill-agent).
    """
    ttl_s: Seconds = 120.0
    """As in the request, or as the agent chose."""


@request(
    "offer",
    Socket.PREFILL,
    refusals="not_registered engine_not_ready geometry offer_exists cancelled draining "
    f"engine_lost {ORDERED}",
)
class MakeOffer(Request[OfferMade], frozen=True):
    """Publish the KV of one request, with one table for all ranks. Until ``released``, do not write
    to the blocks, except for tokens that ``extend`` has yet to announce. A block of several offers
    is free after the last ``released``.
    """

    request_id: Id
    """A request has at most one live offer."""
    num_tokens: Tokens
    """Tokens, from position 0, with KV in the blocks now."""
    tables: Tables
    """The table of a group with a window may [start late](#block-tables)."""
    sealed: bool = True
    """False while prefill continues."""
    ttl_s: Seconds | None = None
    """Time to wait for a reader; nil lets the agent choose. Each ``extend`` and the ``seal``
    restart it. A live lease outlasts it."""
    audience: Text = ""
    """Only this decode engine or agent may use it, where tickets are signed."""
    prompt_digest: Text = ""
    """[Digest of the prompt](#prompt-digest)."""
    transfer_id: Secret | None = None
    """Name from a router; see [Rendezvous](#rendezvous)."""
    readers: Readers = 1
    """In parallel or in turn. The last commit completes the offer."""
    traceparent: Text = ""
    """[W3C Trace Context](https://www.w3.org/TR/trace-context/) of the request."""
    sent_s: Clock | None = None
    cell: CellName = 0
    """Name of its [cell](#commit-cells); 0 for none. Sealed offers with one reader only."""
    offer_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Random, never used for another offer. A repeat with the same ``secret`` has no further
    effect. If empty, the agent chooses."""
    secret: Secret | None = None
    """The right to the offer: 128 random bits. If nil, the agent chooses."""
    left_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    """[Published again](#publish-again) offers only: time left of ``ttl_s``. The agent waits at
    least 10 s."""
    after: SequenceNumber = 0
    park: Park = Park.WHEN_FULL
    """When to [park](#park-an-offer) the offer."""


@request(
    "extend",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED} {ORDERED}",
)
class ExtendOffer(Request[Empty], frozen=True):
    """Add tokens to an open offer. Their bytes are already in the blocks."""

    offer_id: OfferId
    num_tokens: Tokens
    """New total, at least the previous one."""
    tables: Tables = msgspec.field(default_factory=dict)
    """New blocks. ``first_block`` continues at the end of the group's table."""
    after: SequenceNumber = 0


@request(
    "seal",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED} {ORDERED}",
)
class SealOffer(Request[Empty], frozen=True):
    """Complete the offer. A reader can commit only a sealed offer."""

    offer_id: OfferId
    after: SequenceNumber = 0


@request(
    "park",
    Socket.PREFILL,
    refusals="not_registered offer_unknown config",
)
class ParkOffer(Request[Empty], frozen=True):
    """[Park](#park-an-offer) the offer as soon as it is sealed, no lease on it is live, and the
    pool has room.
    """

    offer_id: OfferId


@request("blocks", Socket.PREFILL, refusals="not_registered")
class ReportBlocks(Request[Empty], frozen=True):
    """Report whether the engine is short of free blocks, for [parking](#park-an-offer). Send it
    when this changes, and after ``register`` if true.
    """

    short: bool


@request("withdraw", Socket.PREFILL, refusals="not_registered offer_unknown")
class WithdrawOffer(Request[Empty], frozen=True):
    """End an offer now; its readers fail."""

    offer_id: OfferId


@notice("released")
class Released(Message, frozen=True):
    """The offer has ended, and no lease on its blocks is live: they are the engine's again."""

    offer_id: OfferId
    request_id: Id
    outcome: Outcome
    """``completed``, ``withdrawn``, ``expired`` or [``parked``](#park-an-offer)."""
    commits: Commits = ()


class EndedOffer(Redacted, frozen=True):
    """An offer that its readers have committed."""

    offer_id: OfferId
    request_id: Id
    secret: Secret
    """From the ticket."""
    commits: Commits
    transfer_id: Secret | None = None
    num_tokens: Tokens = 0
    """Tokens when it was sealed."""


@request("republished", Socket.PREFILL, refusals="not_registered")
class Republished(Request[Empty], frozen=True):
    """Declare that all live offers are [published again](#publish-again)."""

    ended: Annotated[tuple[EndedOffer, ...], msgspec.Meta(max_length=MAX_ENDED)] = ()


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that a fetch spent in each stage; ``awaiting`` is for the ticket, ``waiting`` for
    tokens.
    """

    resolving: float = 0.0
    acquiring: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    committing: float = 0.0
    queued: float = 0.0
    awaiting: float = 0.0
    retrying: float = 0.0

    @property
    def total(self) -> float:
        spent_s: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(spent_s)


@notice("landed")
class Landed(Message, frozen=True):
    """A chunk of a fetch with ``chunk_tokens`` has landed; valid only if the fetch completes."""

    fetch_id: FetchId
    num_tokens: Tokens
    """One past the last token that is in the blocks."""


class Fetched(Message, frozen=True):
    """Result of a fetch that has ended. The KV is valid only after ``completed``."""

    fetch_id: FetchId
    request_id: Text
    outcome: Outcome
    """``completed``, ``failed`` or ``cancelled``."""
    stage: Id
    """Stage in which it ended: a field of ``stages_s``, or ``completed``."""
    blocks_free: bool
    """If false, wait for ``blocks_freed``."""
    code: Text = ""
    """[Error code](errors.md), unless it completed."""
    message: Text = ""
    num_bytes: Size = 0
    """Bytes that several ranks hold alike may be read once."""
    path: Text = ""
    """``direct``, ``staged``, ``packed`` or ``mapped``; empty without a read."""
    stages_s: StageTimes = StageTimes()
    whole_blocks: bool = False
    """If false, the first block of a window may have a [gap](protocol-engine.md#block-tables): do
    not cache it."""
    num_tokens: Size = 0
    """As in ``fetch``, or less with ``at_most``."""
    attempts: Size = 1
    """Transient failures are retried until the deadline."""


@request(
    "fetch",
    Socket.DECODE,
    at_once=True,
    refusals="not_registered forbidden prompt_mismatch offer_completed offer_expired "
    "engine_not_ready geometry unsupported_version fetch_exists peer_unreachable draining "
    f"engine_lost {ORDERED}",
)
class StartFetch(Request[Fetched], frozen=True):
    """Fetch tokens ``first_token`` to ``num_tokens`` - 1 of the ticket's request. The reply comes
    when the fetch has ended; after a refusal, it has not started. The agent owns the blocks until a
    reply with ``blocks_free``, or until ``blocks_freed``.
    """

    fetch_id: Id
    """Reuse it only to [repeat](#repeat-a-fetch) this fetch."""
    ticket: dict[str, Any]
    """A [ticket](#ticket) or a [rendezvous](#rendezvous)."""
    num_tokens: Tokens
    """One past the last token position."""
    tables: Tables
    """Exactly the blocks of the [positions](#block-tables) that these tokens need."""
    first_token: Tokens = 0
    """Earlier tokens stay as they are."""
    timeout_s: Seconds | None = None
    """Nil lets the agent choose. The end may come 1 s later, if a reply to ``commit`` is on its
    way."""
    zero_tail: bool = False
    """Zero the slots after the last token in each group's last block."""
    chunk_tokens: Tokens = 0
    """If over 0, read in chunks, each reported by ``landed``. Chunks end at multiples of this
    number, and at the last ready token of an open offer."""
    prompt_digest: Text = ""
    """Empty accepts any prompt. A ticket with another digest is refused (``prompt_mismatch``);
    where tickets are signed, so is one without."""
    priority: Priority = 0
    traceparent: Text = ""
    """As in ``offer``; if empty, the trace of the ticket."""
    sent_s: Clock | None = None
    wanted_s: Clock | None = None
    """Time at which the engine received the request, by the same clock."""
    token: Secret | None = None
    """Token of the ``commit``: random, new for each fetch. If nil, the fetch cannot be repeated."""
    repeated: Size = 0
    """Number of [repeats](#repeat-a-fetch)."""
    at_most: bool = False
    """``num_tokens`` is an upper bound, if the offer was sealed with fewer tokens. Not with
    windows, or with ranks at other agents."""
    after: SequenceNumber = 0


@request(
    "hold",
    Socket.DECODE,
    at_once=True,
    refusals="not_registered forbidden offer_completed offer_expired unsupported_version busy",
)
class HoldOffer(Request[Empty], frozen=True):
    """Keep the offer of a request that waits in the engine's queue, beyond its ``ttl_s``. A hold
    ends with the first fetch of this ticket, after the prefill agent's ``max_hold_s``, or with the
    engine. To release the offer instead, fetch no tokens of it. With too many holds, the engine
    with the most loses its newest.
    """

    ticket: dict[str, Any]


@request("cancel", Socket.DECODE, refusals="not_registered fetch_unknown")
class CancelFetch(Request[Empty], frozen=True):
    """Cancel a fetch. Its reply still comes."""

    fetch_id: FetchId
    release_offer: bool = False
    """Withdraw the offer too, unless the fetch completed."""


@notice("blocks_freed")
class BlocksFreed(Message, frozen=True):
    """The blocks of a fetch that ended without ``blocks_free`` may be reused."""

    fetch_id: FetchId


@notice("leaving")
class Leaving(Message, frozen=True):
    """The agent is stopping. Requests without a reply were not started: use another agent."""
