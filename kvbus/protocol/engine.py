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
"""Numbers of the ranks."""
CellName = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Clock = float
"""Time of the engine's first request for this, in seconds of ``CLOCK_MONOTONIC``. The agent ignores
times in the future, and times over an hour ago."""
CommitMark = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Commits = Annotated[tuple[CommitMark, ...], msgspec.Meta(max_length=2048)]
"""[Marks](#publish-again) of the offer's commits, one for each reader."""
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
    """The ``rank_secret`` that sessions of these ranks sent in ``register``."""
    server_key: ServerKey = ""


@request(
    "register",
    Socket.ENGINE,
    refusals="not_registered engine_conflict engine_lost geometry segment draining config",
)
class Register(Request[Empty], frozen=True):
    """Register this session, once. Without ``rank`` it becomes the engine's control session. With
    ``rank`` it registers the memory of one rank, after the rank's segments were passed.
    """

    engine: EngineSpec
    """The whole engine, identical in all of its sessions."""
    rank: RankSpec | None = None
    """Memory of one rank; nil for the control session."""
    remote_ranks: Annotated[tuple[AgentRanks, ...], msgspec.Meta(max_length=1024)] = ()
    """Control session only: the other agents that have ranks of this engine. At least one rank is
    attached here."""
    rank_secret: Secret | None = None
    """Memory session away from the engine's home only: the right to use the rank at this agent, 128
    random bits. All sessions of the engine at one agent send the same value."""
    role: AgentRole | None = None
    """Role of the engine. An agent of the other role refuses it (``config``)."""
    instance: Text = ""
    """Random name of the control session, or of the rank's memory. It stays the same each time that
    this process registers it. If empty, the agent chooses one, and the engine cannot publish offers
    again."""
    republishes: bool = False
    """Control session at a prefill agent only: whether it [publishes again](#publish-again) the
    offers of an earlier process of the agent. Until ``republished``, the agent refuses readers with
    ``engine_not_ready``."""


class RanksReady(Message, frozen=True):
    memory: Id
    """Id of the ranks' memory at this agent. If it changes, a rank has new memory, and offers of
    the old memory are lost."""


@request("ready", Socket.ENGINE, refusals="not_registered engine_lost")
class AwaitReady(Request[RanksReady], frozen=True):
    """Wait until the engine is ready: the control session is registered, and so are all ranks that
    ``remote_ranks`` does not name. Use a long timeout.
    """


@request("detach", Socket.ENGINE, refusals="not_registered")
class Detach(Request[Empty], frozen=True):
    """End this session on purpose, and with it [the whole
    engine](#when-the-attach-connection-ends). Close the attach connection after the reply.
    """


@request("ping", Socket.ENGINE)
class Ping(Request[Empty], frozen=True):
    """Check that the agent is alive."""


class OfferMade(Message, frozen=True):
    offer_id: Id
    """Id of the offer."""
    ticket: dict[str, Any]
    """[Ticket](#ticket) for the decode engine. Pass it on unchanged, except for ``ticket_blocks``.
    """
    ticket_blocks: Size = 0
    """Open offers only: number of blocks that the engine may name in the ticket. Once all tokens
    are computed, it may set the ticket's ``num_tokens`` and ``blocks`` to the values that it is
    going to seal."""
    ttl_s: Seconds = 120.0
    """The offer's ``ttl_s``, or the value that the agent chose."""


@request(
    "offer",
    Socket.PREFILL,
    refusals="not_registered engine_not_ready geometry offer_exists cancelled draining "
    f"engine_lost {ORDERED}",
)
class MakeOffer(Request[OfferMade], frozen=True):
    """Publish the KV of one request. One table serves all ranks. Until ``released``, the engine
    must not write to the blocks, except for tokens that ``extend`` has yet to announce. The engine
    may reuse a block of several offers after all of them are released.
    """

    request_id: Id
    """The engine's id of the request. A request has at most one live offer."""
    num_tokens: Tokens
    """Number of tokens, from position 0, that have KV in the blocks now."""
    tables: Tables
    """Block tables by group. The table of a group with a window may [start late](#block-tables)."""
    sealed: bool = True
    """Whether the offer is complete; false while prefill continues."""
    ttl_s: Seconds | None = None
    """Seconds that the offer waits for a reader; nil lets the agent choose. Each ``extend`` and the
    ``seal`` restart the count. A live lease outlasts it."""
    audience: Text = ""
    """Id of the only decode engine or agent that may use the ticket, where tickets are signed;
    empty for any."""
    prompt_digest: Text = ""
    """[Digest of the prompt](#prompt-digest) for the ticket; empty for none."""
    transfer_id: Secret | None = None
    """Name that a router gave to the offer; see [Rendezvous](#rendezvous)."""
    readers: Readers = 1
    """Number of readers, in parallel or in turn. The offer completes when the last one has
    committed it."""
    traceparent: Text = ""
    """Trace of the request, in the form of [W3C Trace
    Context](https://www.w3.org/TR/trace-context/). The agent ignores other forms."""
    sent_s: Clock | None = None
    cell: CellName = 0
    """Name of the offer's [cell](#commit-cells); 0 for none. Only for a sealed offer with one
    reader."""
    offer_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Random id of the offer, never used for another one. A repeat with the same ``offer_id`` and
    ``secret`` has no further effect. If empty, the agent chooses."""
    secret: Secret | None = None
    """The right to the offer: 128 random bits. If nil, the agent chooses."""
    left_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    """[Published again](#publish-again) offers only: seconds left of ``ttl_s``. The agent waits at
    least 10 s, for a reader that had a lease."""
    after: SequenceNumber = 0
    """Number of the GPU work that computes the tokens: until it has ended, the agent delays this
    request, and later ones about the offer."""
    park: Park = Park.WHEN_FULL
    """When the offer is [parked](#park-an-offer), if the agent has a pool."""


@request(
    "extend",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED} {ORDERED}",
)
class ExtendOffer(Request[Empty], frozen=True):
    """Add tokens to an open offer. Their bytes are already in the blocks."""

    offer_id: OfferId
    num_tokens: Tokens
    """New total number of tokens, at least the previous one."""
    tables: Tables = msgspec.field(default_factory=dict)
    """New blocks of each group. ``first_block`` continues at the end of the group's table."""
    after: SequenceNumber = 0
    """As in ``offer``."""


@request(
    "seal",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED} {ORDERED}",
)
class SealOffer(Request[Empty], frozen=True):
    """Seal the offer: no more tokens will come. A reader can commit only a sealed offer."""

    offer_id: OfferId
    after: SequenceNumber = 0
    """As in ``offer``."""


@request(
    "park",
    Socket.PREFILL,
    refusals="not_registered offer_unknown config",
)
class ParkOffer(Request[Empty], frozen=True):
    """[Park](#park-an-offer) the offer as soon as it is sealed, no lease on it is live, and the
    agent's pool has room. No effect on an offer that has ended.
    """

    offer_id: OfferId


@request("blocks", Socket.PREFILL, refusals="not_registered")
class ReportBlocks(Request[Empty], frozen=True):
    """Report whether the engine runs short of free blocks. While it does, the agent
    [parks](#park-an-offer) its offers as soon as it can. Send it only when this changes, and after
    ``register`` if it is true.
    """

    short: bool
    """Whether the engine runs short."""


@request("withdraw", Socket.PREFILL, refusals="not_registered offer_unknown")
class WithdrawOffer(Request[Empty], frozen=True):
    """End an offer now; its readers fail. No effect on an offer that has ended."""

    offer_id: OfferId


@notice("released")
class Released(Message, frozen=True):
    """The offer has ended for the engine, and no lease on its blocks is live. They are the engine's
    again.
    """

    offer_id: OfferId
    request_id: Id
    """As in ``offer``."""
    outcome: Outcome
    """``completed``, ``withdrawn``, ``expired``, or ``parked`` if the agent has
    [parked](#park-an-offer) it."""
    commits: Commits = ()


class EndedOffer(Redacted, frozen=True):
    """An offer that its readers have committed."""

    offer_id: OfferId
    request_id: Id
    """As in ``offer``."""
    secret: Secret
    """The right to the offer, from its ticket."""
    commits: Commits
    transfer_id: Secret | None = None
    """As in ``offer``."""
    num_tokens: Tokens = 0
    """Number of tokens when the offer was sealed."""


@request("republished", Socket.PREFILL, refusals="not_registered")
class Republished(Request[Empty], frozen=True):
    """Declare that all live offers of the engine are published again. Readers may use it from now
    on.
    """

    ended: Annotated[tuple[EndedOffer, ...], msgspec.Meta(max_length=MAX_ENDED)] = ()
    """Offers that were committed shortly before. Readers may repeat requests that got no reply."""


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that a fetch spent in each stage; 0 for a stage that it did not reach."""

    resolving: float = 0.0
    """Finding the agent and shaking hands."""
    acquiring: float = 0.0
    """Acquiring the lease."""
    waiting: float = 0.0
    """Waiting for tokens."""
    reading: float = 0.0
    """Moving bytes."""
    committing: float = 0.0
    """Confirming the bytes with the prefill agent."""
    queued: float = 0.0
    """Waiting in the queue of fetches."""
    awaiting: float = 0.0
    """Waiting for the ticket."""
    retrying: float = 0.0
    """Ending failed attempts, and pausing before the next ones."""

    @property
    def total(self) -> float:
        spent_s: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(spent_s)


@notice("landed")
class Landed(Message, frozen=True):
    """A chunk of a fetch with ``chunk_tokens`` has landed. It is valid only if the reply to
    ``fetch`` has ``completed``.
    """

    fetch_id: FetchId
    num_tokens: Tokens
    """Tokens from ``first_token`` to this one, exclusive, are in the blocks."""


class Fetched(Message, frozen=True):
    """Result of a fetch that has ended. The KV is valid only after ``completed``."""

    fetch_id: FetchId
    request_id: Text
    """Request id from the ticket."""
    outcome: Outcome
    """``completed``, ``failed`` or ``cancelled``."""
    stage: Id
    """Stage in which it ended: ``awaiting``, ``resolving``, ``queued``, ``acquiring``, ``waiting``,
    ``reading``, ``committing`` or ``completed``."""
    blocks_free: bool
    """Whether the blocks may be reused now. If false, wait for ``blocks_freed``."""
    code: Text = ""
    """[Error code](errors.md) of a fetch that did not complete."""
    message: Text = ""
    """Explanation for people."""
    num_bytes: Size = 0
    """Bytes read. Bytes that several ranks hold alike may be read once."""
    path: Text = ""
    """Path of the read: ``direct``, ``staged``, ``packed`` or ``mapped``; empty without a read."""
    stages_s: StageTimes = StageTimes()
    """Time spent in each stage."""
    whole_blocks: bool = False
    """If false, the first block of a window may have a [gap](protocol-engine.md#block-tables): do
    not cache it."""
    num_tokens: Size = 0
    """One past the last token that was wanted: as in ``fetch``, or less with ``at_most``."""
    attempts: Size = 1
    """Number of attempts. The agent retries transient failures until the deadline."""


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
    when the fetch has ended; a refusal means that it did not start. The agent owns the blocks until
    a reply with ``blocks_free``, or until ``blocks_freed``.
    """

    fetch_id: Id
    """The engine's id of this fetch. Reuse it only to repeat this fetch."""
    ticket: dict[str, Any]
    """A [ticket](#ticket) or a [rendezvous](#rendezvous)."""
    num_tokens: Tokens
    """One past the last token position that is wanted."""
    tables: Tables
    """For each group, exactly the blocks of the [positions](#block-tables) that these tokens need.
    """
    first_token: Tokens = 0
    """First position that is wanted. Earlier tokens stay as they are."""
    timeout_s: Seconds | None = None
    """Seconds until the fetch ends; nil lets the agent choose. The end may come 1 s later if the
    reply to the ``commit`` is on its way at the deadline."""
    zero_tail: bool = False
    """Whether to zero the slots after the last token in each group's last block."""
    chunk_tokens: Tokens = 0
    """If over 0, tokens are read in chunks, and ``landed`` reports each one. Chunks end at
    multiples of this number, and at the last ready token of an open offer."""
    prompt_digest: Text = ""
    """Digest of the prompt; empty accepts KV of any prompt. A ticket with another digest is refused
    (``prompt_mismatch``). Where tickets are signed, so is a ticket without one."""
    priority: Priority = 0
    traceparent: Text = ""
    """As in ``offer``; if empty, the trace of the ticket."""
    sent_s: Clock | None = None
    wanted_s: Clock | None = None
    """Time at which the engine received the request, by the same clock."""
    token: Secret | None = None
    """Token of the fetch's ``commit``: random, and new for each fetch. If nil, the agent draws one,
    and the fetch cannot be repeated."""
    repeated: Size = 0
    """Number of times that the engine has repeated this fetch because its agent was lost; see
    [Repeat a fetch](#repeat-a-fetch)."""
    at_most: bool = False
    """Whether ``num_tokens`` is an upper bound: if the offer was sealed with fewer tokens, those
    are fetched. Not with windows, or with ranks at other agents."""
    after: SequenceNumber = 0
    """Number of the last GPU work that may use the blocks: until it has ended, the agent delays
    this request, and a ``cancel`` of the fetch."""


@request(
    "hold",
    Socket.DECODE,
    at_once=True,
    refusals="not_registered forbidden offer_completed offer_expired unsupported_version busy",
)
class HoldOffer(Request[Empty], frozen=True):
    """Keep the offer of a request that waits in the engine's queue, so that its ``ttl_s`` does not
    end it. The agent renews all held offers of a prefill agent with one request. A hold ends with
    the first fetch of this ticket, after the prefill agent's ``max_hold_s``, or when the engine
    detaches or is lost. A hold of an offer that has ended has no effect.

    To release the offer instead, fetch no tokens of it. After ``busy``, wait until another hold has
    ended. If engines hold more offers than the agent may have, or those of more prefill agents, the
    engine with the most loses its newest.
    """

    ticket: dict[str, Any]
    """As in ``fetch``."""


@request("cancel", Socket.DECODE, refusals="not_registered fetch_unknown")
class CancelFetch(Request[Empty], frozen=True):
    """Cancel a fetch. Its reply still comes. No effect on a fetch that has ended."""

    fetch_id: FetchId
    release_offer: bool = False
    """Whether to withdraw the offer too, unless the fetch completed."""


@notice("blocks_freed")
class BlocksFreed(Message, frozen=True):
    """The blocks of a fetch that ended without ``blocks_free`` may be reused: nothing can write to
    them any longer.
    """

    fetch_id: FetchId


@notice("leaving")
class Leaving(Message, frozen=True):
    """The agent is stopping. Requests without a reply were not started: use another agent."""
