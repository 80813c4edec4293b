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
Clock = float
"""When the engine asked for this, in seconds of ``CLOCK_MONOTONIC``, which engine and agent share;
the same when it asks again after ``busy``. A time that cannot be true, as in another time
namespace, or was more than an hour ago, is ignored."""


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
    """What a session of these ranks said in ``register``. It is a secret."""
    server_key: ServerKey = ""


@request(
    "register",
    Socket.ENGINE,
    repeatable=False,
    refusals="not_registered engine_conflict geometry segment draining config",
)
class Register(Request[Empty], frozen=True):
    """Registers this session with the agent: without ``rank`` as the engine's control session, with
    ``rank`` as the memory of one rank. All segments that the rank names were passed before. A
    session registers once.
    """

    engine: EngineSpec
    """The whole engine. Every session of an engine states the same."""
    rank: RankSpec | None = None
    """The memory of one rank; nil for the control session."""
    others: Annotated[tuple[AgentRanks, ...], msgspec.Meta(max_length=1024)] = ()
    """Of a control session: the other agents that have ranks of this engine, and which. Each rank
    is named once, or is attached here; at least one is here. A session with ``rank`` leaves it
    empty."""
    notices: bool = False
    """Of a session with ``rank``: it gets every notice that the control session gets, if that one
    is with the same agent. For workers that report to their engine what has ended."""
    access: Secret | None = None
    """Of a session with ``rank`` that is not at the engine's home: who shows it may ask this agent
    about the rank. 128 random bits, the same from all of the engine's sessions with one agent; the
    control session says it in ``others``. It is a secret."""
    role: AgentRole | None = None
    """What the engine is. An agent of the other role refuses it with ``config``; where the engine
    does not say it, only its first ``offer`` or ``fetch`` fails, with ``unknown_op``."""


@request("ready", Socket.ENGINE, refusals="not_registered engine_lost")
class AwaitReady(Request[Empty], frozen=True):
    """Asks to be told when the control session and all ranks that ``others`` does not name are
    registered. The reply comes then, so give it a long timeout. Ask the agent of the control
    session: where only ranks are attached, it is never answered.
    """


@request("detach", Socket.ENGINE, refusals="not_registered")
class Detach(Request[Empty], frozen=True):
    """Says that this session ends on purpose. Close the attach connection after the reply: that
    [ends the whole engine](#when-the-attach-connection-ends), whichever session it is.
    """


@request("ping", Socket.ENGINE)
class Ping(Request[Empty], frozen=True):
    """Asks for a sign of life. Every ZeroMQ socket that takes requests answers it. The answer's
    ``boot`` tells whether the other side is still the same process.
    """


class OfferMade(Message, frozen=True):
    offer_id: Id
    """The agent's name of the offer."""
    ticket: dict[str, Any]
    """The [ticket](#ticket). Give it to the decode engine unchanged; for the one exception see
    ``ticket_blocks``."""
    ticket_blocks: Size = 0
    """Most blocks that the engine may name in the ticket of an open offer. Once it has computed all
    tokens it may set ``num_tokens`` and ``blocks`` of the ticket to what it is about to seal, and
    write to these blocks no more. 0: it may not, as the offer is sealed, or the site signs its
    tickets."""


@request(
    "offer",
    Socket.PREFILL,
    repeatable=False,
    refusals="not_registered engine_not_ready geometry offer_exists cancelled draining",
)
class MakeOffer(Request[OfferMade], frozen=True):
    """Publishes the KV of one request. One table serves all ranks. Several offers may name the same
    blocks: they are the engine's again when all are released. From now until ``released`` the
    blocks must not be written or given to another request; blocks that are yet to be filled may be
    written before ``extend`` announces them.
    """

    request_id: Id
    """The engine's name of the request. One live offer a request."""
    num_tokens: Tokens
    """Tokens, from position 0 on, whose KV is in the blocks now."""
    tables: Tables
    """Block table of each group, by group name. That of a group with a window may start late: see
    [Block tables](#block-tables)."""
    sealed: bool = True
    """Whether that is all. False for a prefill that goes on."""
    ttl_s: Seconds | None = None
    """Seconds that the offer waits for a reader; nil lets the agent choose. ``extend`` and ``seal``
    start it anew; a live lease outlasts it, and so does a reader that asks to ``take`` the offer
    before its seal."""
    audience: Text = ""
    """The id of the one decode engine, or decode agent, that may use the ticket; empty for any.
    Looked at where tickets are signed."""
    prompt_digest: Text = ""
    """What the prompt, and all else that its KV depends on, is known by; it goes into the ticket.
    Empty when the KV is of no certain prompt."""
    transfer_id: Secret | None = None
    """The name that a router gave the offer; see [Rendezvous](#rendezvous). Each is for one offer:
    another one is refused with ``offer_exists``."""
    readers: Readers = 1
    """So many readers may read the offer, at the same time or one after the other. It is completed
    when the last of them has taken what it read; after ``ttl_s``, when fewer have."""
    traceparent: Text = ""
    """The trace that the request belongs to, as
    [W3C Trace Context](https://www.w3.org/TR/trace-context/) writes it: ``00-`` and 32, ``-`` and
    16, ``-`` and 2 hexadecimal digits. What is not of this form is ignored. The ticket carries
    it."""
    asked_s: Clock | None = None


@request(
    "extend",
    Socket.PREFILL,
    repeatable=False,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED}",
)
class ExtendOffer(Request[Empty], frozen=True):
    """Announces more tokens of an open offer. Their bytes are in the blocks before this is sent."""

    offer_id: OfferId
    num_tokens: Tokens
    """The new sum of tokens, not less than before."""
    tables: Tables = msgspec.field(default_factory=dict)
    """Only the new blocks of each group. ``first_block`` continues where its table ended."""


@request(
    "seal",
    Socket.PREFILL,
    refusals=f"not_registered geometry offer_unknown offer_sealed {OFFER_ENDED}",
)
class SealOffer(Request[Empty], frozen=True):
    """Says that no more tokens will come. Only a sealed offer can be taken by a reader."""

    offer_id: OfferId


@request("withdraw", Socket.PREFILL, refusals="not_registered offer_unknown")
class WithdrawOffer(Request[Empty], frozen=True):
    """Ends an offer now. A lease on it is revoked, and its reader fails. Withdrawing an offer that
    has ended is ok and changes nothing.
    """

    offer_id: OfferId


@notice("released")
class Released(Message, frozen=True):
    """The offer has ended and no lease on it is live. Its blocks are the engine's again."""

    offer_id: OfferId
    request_id: Id
    """As in ``offer``."""
    outcome: Outcome
    """``completed``: its readers took it. ``withdrawn``: by the engine, a router or the agent's
    end. ``expired``: no reader in time. No others."""


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that a fetch spent in each stage; 0 for a stage that it did not reach."""

    resolving: float = 0.0
    """Finding the agent and shaking hands."""
    claiming: float = 0.0
    """Getting the lease."""
    waiting: float = 0.0
    """Waiting for tokens, all that were ready having been read."""
    reading: float = 0.0
    """Moving bytes."""
    taking: float = 0.0
    """Asking whether what was read is good."""
    queued: float = 0.0
    """Waiting for its turn, without a lease, while as many fetches as may be are under way."""
    meeting: float = 0.0
    """Waiting for the ticket of an offer that was not made yet."""

    @property
    def total(self) -> float:
        """Seconds from the request to the end."""
        spent_s: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(spent_s)


@notice("landed")
class Landed(Message, frozen=True):
    """A chunk of a fetch with ``chunk_tokens`` has landed. The KV is valid only when the answer to
    ``fetch`` says ``completed``; an engine may copy it elsewhere before.
    """

    fetch_id: FetchId
    num_tokens: Tokens
    """Tokens ``first_token`` to this one, exclusive, are in the blocks."""


@notice("fetched")
class Fetched(Message, frozen=True):
    """The fetch has ended: the answer to ``fetch``, and a notice to the sessions of ranks that
    asked for it. Only ``completed`` means that the KV in the blocks may be used.
    """

    fetch_id: FetchId
    request_id: Text
    """The request id in the ticket."""
    outcome: Outcome
    """``completed``, ``failed`` or ``cancelled``."""
    stage: Id
    """The stage in which it ended: ``meeting``, ``resolving``, ``queued``, ``claiming``,
    ``waiting``, ``reading``, ``taking`` or ``completed``."""
    blocks_free: bool
    """Whether the blocks may be used again now. When false, a transfer can still write into them:
    wait for ``blocks_freed``."""
    code: Text = ""
    """The [error code](errors.md) of a fetch that did not complete. Text, since a newer agent
    may have new codes."""
    message: Text = ""
    """A sentence for a person."""
    num_bytes: Size = 0
    """Bytes that were read. What several ranks hold alike may be read once for all of them."""
    path: Text = ""
    """How they were read: ``direct``, ``packed`` or ``mapped``; empty when nothing
    was."""
    stages_s: StageTimes = StageTimes()
    """Where the time went."""
    whole_blocks: bool = False
    """When false, the first block of a window may have a gap in front of the window: an engine that
    caches whole blocks must not cache it. See [Block tables](#block-tables)."""
    num_tokens: Size = 0
    """One past the last token that was wanted: what ``fetch`` said, or less with ``at_most``."""


@request(
    "fetch",
    Socket.DECODE,
    at_once=True,
    repeatable=False,
    refusals="not_registered forbidden offer_completed offer_expired engine_not_ready geometry "
    "unsupported_version fetch_exists peer_unreachable draining",
)
class StartFetch(Request[Fetched], frozen=True):
    """Asks for tokens ``first_token`` up to, but without, ``num_tokens`` of the ticket's request.
    An open offer is read while it grows. It is answered when it has ended, and refused when it was
    not begun. The blocks belong to the agent until the answer, if that has ``blocks_free``, or
    until ``blocks_freed``.
    """

    fetch_id: Id
    """The engine's name of this fetch. Never used again, not even for the same request."""
    ticket: dict[str, Any]
    """The [ticket](#ticket) as it was given, or a [rendezvous](#rendezvous)."""
    num_tokens: Tokens
    """One past the last token position that is wanted."""
    tables: Tables
    """By group, exactly the blocks that hold the [positions](#block-tables) which tokens
    ``first_token`` to ``num_tokens`` - 1 need. A table for each group, also when it is empty."""
    first_token: Tokens = 0
    """First token position that is wanted. Tokens before it stay as they are, in a shared block
    too."""
    timeout_s: Seconds | None = None
    """Seconds until the fetch has ended, one way or the other; nil lets the agent choose. It may
    complete a little later (at most a second), when the prefill agent's last word is on its way by
    then."""
    zero_tail: bool = False
    """Whether the slots of each group's last block behind the last token are set to zero bytes.
    Else they stay as they were."""
    chunk_tokens: Tokens = 0
    """When over 0, tokens are read in chunks that end at multiples of it, and, while the offer is
    open, also where the ready tokens end. The notice ``landed`` tells of each. A multiple of the
    block size makes most sense."""
    prompt_digest: Text = ""
    """What the prompt of this fetch is known by. A ticket with another digest is refused as
    ``forbidden``; so is one with none, where tickets are signed. Empty to take KV of any prompt."""
    priority: Priority = 0
    traceparent: Text = ""
    """The trace that the request belongs to, as in ``offer``; that of the ticket when this is
    empty, or none."""
    asked_s: Clock | None = None
    wanted_s: Clock | None = None
    """Since when the engine has had the request, which waited there for its turn until ``asked_s``;
    by the same clock, and for spans alone."""
    at_most: bool = False
    """Whether ``num_tokens`` is a bound only: when the offer is sealed with fewer, the fetch is of
    these. Not for an engine with windows, or with ranks at other agents."""


@request("cancel", Socket.DECODE, refusals="not_registered fetch_unknown")
class CancelFetch(Request[Empty], frozen=True):
    """Gives a fetch up. The answer to it still comes. Cancelling a fetch that has ended is ok and
    changes nothing of it.
    """

    fetch_id: FetchId
    release_offer: bool = False
    """Nobody will fetch this ticket any more: unless the fetch completed, the agent has the offer
    withdrawn, also when the fetch has ended by now."""


@notice("blocks_freed")
class BlocksFreed(Message, frozen=True):
    """Nothing can write into the blocks of an ended fetch any more. Follows an answer to ``fetch``
    whose ``blocks_free`` was false.
    """

    fetch_id: FetchId


@notice("leaving")
class Leaving(Message, frozen=True):
    """The agent ends. What has no answer by now was not begun: another agent may be asked."""
