"""Messages between an agent and its local engine on the engine socket."""

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
WordName = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Clock = float
"""When the engine asked for this first, in seconds of ``CLOCK_MONOTONIC``. A time that cannot be
true, or was over an hour ago, is ignored."""
CommitMark = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Commits = Annotated[tuple[CommitMark, ...], msgspec.Meta(max_length=2048)]
"""The [marks](#publish-again) of the commits of an offer, one for each reader."""
MAX_ENDED = 1024
"""Of one message: the offers that were committed last."""


class AgentRole(StrEnum):
    """Which side of a handoff the agent serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """How an offer or a fetch ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


class AgentRanks(Redacted, frozen=True):
    """Ranks of an engine that are attached to another agent."""

    endpoint: Endpoint
    ranks: Ranks
    access: Secret
    """What a session of these ranks said in ``register``."""
    server_key: ServerKey = ""


@request(
    "register",
    Socket.ENGINE,
    refusals="not_registered engine_conflict engine_lost geometry segment draining config",
)
class Register(Request[Empty], frozen=True):
    """Registers this session, once: without ``rank`` as the engine's control session, with it as
    the memory of one rank, whose segments were passed before.
    """

    engine: EngineSpec
    """The whole engine, the same from all of its sessions."""
    rank: RankSpec | None = None
    """The memory of one rank; nil for the control session."""
    others: Annotated[tuple[AgentRanks, ...], msgspec.Meta(max_length=1024)] = ()
    """Of a control session: the other agents that have ranks of this engine. At least one rank is
    attached here."""
    access: Secret | None = None
    """Of a session with ``rank`` that is not at the engine's home: the right to ask this agent
    about the rank, 128 random bits. All sessions of the engine with one agent say the same."""
    role: AgentRole | None = None
    """What the engine is. An agent of the other role refuses it (``config``)."""
    instance: Text = ""
    """Names the control session, or the memory of the rank: random, and the same each time that
    this process registers it. Empty lets the agent choose; then the engine cannot publish offers
    again."""
    republishes: bool = False
    """Of a control session at a prefill agent: whether it [publishes again](#publish-again) what an
    earlier process of the agent had. Until ``republished`` readers are refused with
    ``engine_not_ready``."""


class RanksReady(Message, frozen=True):
    memory: Id
    """Names the memory of the ranks at this agent. Another value means that a rank has other
    memory than before: offers of the earlier one are lost."""


@request("ready", Socket.ENGINE, refusals="not_registered engine_lost")
class AwaitReady(Request[RanksReady], frozen=True):
    """Answered when the control session and all ranks that ``others`` does not name are registered,
    so give it a long timeout.
    """


@request("detach", Socket.ENGINE, refusals="not_registered")
class Detach(Request[Empty], frozen=True):
    """This session ends on purpose, and with it [the whole
    engine](#when-the-attach-connection-ends). Close the attach connection after the reply.
    """


@request("ping", Socket.ENGINE)
class Ping(Request[Empty], frozen=True):
    """Asks for a sign of life."""


class OfferMade(Message, frozen=True):
    offer_id: Id
    """The agent's name of the offer."""
    ticket: dict[str, Any]
    """The [ticket](#ticket), for the decode engine; unchanged, but for ``ticket_blocks``."""
    ticket_blocks: Size = 0
    """Of an open offer: how many blocks the engine may name in the ticket. Once all tokens are
    computed it may set ``num_tokens`` and ``blocks`` to what it is about to seal."""
    ttl_s: Seconds = 120.0
    """The ``ttl_s`` of the offer, or what the agent chose."""


@request(
    "offer",
    Socket.PREFILL,
    refusals="not_registered engine_not_ready geometry offer_exists cancelled draining",
)
class MakeOffer(Request[OfferMade], frozen=True):
    """Publishes the KV of one request; one table serves all ranks. Until ``released`` the engine
    does not write to the blocks, but for tokens that ``extend`` is yet to announce. Blocks of
    several offers are the engine's again when all are released.
    """

    request_id: Id
    """The engine's name of the request. One live offer a request."""
    num_tokens: Tokens
    """Tokens, from 0 on, whose KV is in the blocks now."""
    tables: Tables
    """By group; that of a group with a window may [start late](#block-tables)."""
    sealed: bool = True
    """Whether that is all. False for a prefill that goes on."""
    ttl_s: Seconds | None = None
    """Seconds that the offer waits for a reader, from each ``extend`` and ``seal`` on; nil lets the
    agent choose. A live lease outlasts it."""
    audience: Text = ""
    """Id of the decode engine or agent that alone may use the ticket, where tickets are signed."""
    prompt_digest: Text = ""
    """For the ticket: the [digest of the prompt](#prompt-digest); empty for none."""
    transfer_id: Secret | None = None
    """The name that a router gave the offer; see [Rendezvous](#rendezvous)."""
    readers: Readers = 1
    """So many may read the offer, at once or in turn. It is completed when the last has taken it.
    """
    traceparent: Text = ""
    """The trace of the request, in the form of [W3C Trace
    Context](https://www.w3.org/TR/trace-context/). What is not of this form is ignored."""
    asked_s: Clock | None = None
    word: WordName = 0
    """The name of the offer's [word](#words); 0 for none. Only of a sealed offer for one reader."""
    offer_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """The name of the offer: random, and never used for another one. Sent again with the same
    ``secret``, the request has no further effect. Empty lets the agent choose."""
    secret: Secret | None = None
    """The right to the offer: 128 random bits. Nil lets the agent choose."""
    left_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None
    """Of an offer that is [published again](#publish-again): the seconds that are left of
    ``ttl_s``. The agent waits at least 10 s, for a reader that had a lease."""


@request(
    "extend",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED}",
)
class ExtendOffer(Request[Empty], frozen=True):
    """More tokens of an open offer, whose bytes are in the blocks by now."""

    offer_id: OfferId
    num_tokens: Tokens
    """The new sum of tokens, not less than before."""
    tables: Tables = msgspec.field(default_factory=dict)
    """The new blocks of each group; ``first_block`` continues where its table ended."""


@request(
    "seal",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED}",
)
class SealOffer(Request[Empty], frozen=True):
    """No more tokens will come. Only a sealed offer can be taken by a reader."""

    offer_id: OfferId


@request("withdraw", Socket.PREFILL, refusals="not_registered offer_unknown")
class WithdrawOffer(Request[Empty], frozen=True):
    """Ends an offer now: its readers fail. Without effect for one that has ended."""

    offer_id: OfferId


@notice("released")
class Released(Message, frozen=True):
    """The offer has ended, no lease on it is live, and its blocks are the engine's again."""

    offer_id: OfferId
    request_id: Id
    """As in ``offer``."""
    outcome: Outcome
    """``completed``, ``withdrawn`` or ``expired``."""
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
    """Tokens of the offer, at its seal."""


@request("republished", Socket.PREFILL, refusals="not_registered")
class Republished(Request[Empty], frozen=True):
    """All live offers of the engine are published again: readers may use it from now on."""

    ended: Annotated[tuple[EndedOffer, ...], msgspec.Meta(max_length=MAX_ENDED)] = ()
    """Offers that were committed shortly before. A reader whose reply was lost may repeat its
    request."""


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that a fetch spent in each stage; 0 for a stage that it did not reach."""

    resolving: float = 0.0
    """Finding the agent and shaking hands."""
    claiming: float = 0.0
    """Getting the lease."""
    waiting: float = 0.0
    """Waiting for tokens."""
    reading: float = 0.0
    """Moving bytes."""
    taking: float = 0.0
    """Asking whether what was read is good."""
    queued: float = 0.0
    """Waiting for its turn."""
    meeting: float = 0.0
    """Waiting for the ticket."""
    retrying: float = 0.0
    """Ending attempts that failed, and pausing before the next ones."""

    @property
    def total(self) -> float:
        """Seconds from the request to the end."""
        spent_s: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(spent_s)


@notice("landed")
class Landed(Message, frozen=True):
    """A chunk of a fetch with ``chunk_tokens`` has landed. It is valid only when the answer to
    ``fetch`` says ``completed``.
    """

    fetch_id: FetchId
    num_tokens: Tokens
    """Tokens ``first_token`` to this one, exclusive, are in the blocks."""


class Fetched(Message, frozen=True):
    """The fetch has ended. The KV is valid only after ``completed``."""

    fetch_id: FetchId
    request_id: Text
    """The request id in the ticket."""
    outcome: Outcome
    """``completed``, ``failed`` or ``cancelled``."""
    stage: Id
    """Where it ended: ``meeting``, ``resolving``, ``queued``, ``claiming``, ``waiting``,
    ``reading``, ``taking`` or ``completed``."""
    blocks_free: bool
    """Whether the blocks may be used again. When false, not before ``blocks_freed``."""
    code: Text = ""
    """The [error code](errors.md) of a fetch that did not complete."""
    message: Text = ""
    """A sentence for a person."""
    num_bytes: Size = 0
    """Bytes that were read; what several ranks hold alike may be read once."""
    path: Text = ""
    """How they were read: ``direct``, ``staged``, ``packed`` or ``mapped``; else empty."""
    stages_s: StageTimes = StageTimes()
    """Where the time went."""
    whole_blocks: bool = False
    """When false, the first block of a window may have a [gap](#block-tables), and must not be
    cached."""
    num_tokens: Size = 0
    """One past the last token that was wanted: what ``fetch`` said, or less with ``at_most``."""
    attempts: Size = 1
    """How often the agent tried. It repeats what may pass, until the deadline."""


@request(
    "fetch",
    Socket.DECODE,
    at_once=True,
    refusals="not_registered forbidden prompt_mismatch offer_completed offer_expired "
    "engine_not_ready geometry unsupported_version fetch_exists peer_unreachable draining",
)
class StartFetch(Request[Fetched], frozen=True):
    """Asks for tokens ``first_token`` to ``num_tokens`` - 1 of the ticket's request. Answered when
    it has ended, refused when it was not begun. The blocks are the agent's until the answer, if
    that has ``blocks_free``, or until ``blocks_freed``.
    """

    fetch_id: Id
    """The engine's name of this fetch, never used again but to repeat it."""
    ticket: dict[str, Any]
    """A [ticket](#ticket) or a [rendezvous](#rendezvous)."""
    num_tokens: Tokens
    """One past the last token position that is wanted."""
    tables: Tables
    """For each group exactly the blocks of the [positions](#block-tables) that these tokens need.
    """
    first_token: Tokens = 0
    """First position that is wanted. Tokens before it stay as they are."""
    timeout_s: Seconds | None = None
    """Seconds until the fetch has ended, or one more when the prefill agent's last word is on its
    way by then; nil lets the agent choose."""
    zero_tail: bool = False
    """Whether the slots behind the last token, in each group's last block, are zeroed."""
    chunk_tokens: Tokens = 0
    """When over 0, tokens are read in chunks that end at multiples of it, and where the ready
    tokens of an open offer end; ``landed`` tells of each."""
    prompt_digest: Text = ""
    """The digest of the prompt; empty to take KV of any. A ticket with another one, or with none
    where tickets are signed, is refused (``prompt_mismatch``)."""
    priority: Priority = 0
    traceparent: Text = ""
    """As in ``offer``; when there is none, that of the ticket."""
    asked_s: Clock | None = None
    wanted_s: Clock | None = None
    """Since when the engine has had the request, by the same clock."""
    token: Secret | None = None
    """The token of the fetch's ``take``: random, and new for each fetch. The agent draws one when
    it is nil; then the fetch cannot be repeated."""
    repeated: Size = 0
    """How often the engine has repeated this fetch, as its agent was lost; see [Repeat a
    fetch](#repeat-a-fetch)."""
    at_most: bool = False
    """Whether ``num_tokens`` is only a bound: of an offer sealed with fewer, these are fetched. Not
    with windows, or with ranks at other agents."""


@request("cancel", Socket.DECODE, refusals="not_registered fetch_unknown")
class CancelFetch(Request[Empty], frozen=True):
    """Gives a fetch up; its answer still comes. Without effect for one that has ended."""

    fetch_id: FetchId
    release_offer: bool = False
    """Whether the offer is withdrawn, too, unless the fetch completed."""


@notice("blocks_freed")
class BlocksFreed(Message, frozen=True):
    """Nothing can write any more into the blocks of a fetch that ended without ``blocks_free``."""

    fetch_id: FetchId


@notice("leaving")
class Leaving(Message, frozen=True):
    """The agent ends. What has no answer by now was not begun: ask another agent."""
