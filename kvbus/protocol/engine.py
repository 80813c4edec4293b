"""Messages between an agent and its local engine on the engine socket."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.geometry import BlockTable, EngineSpec, RankSpec
from kvbus.geometry.spec import Index
from kvbus.protocol.message import (
    Discreet,
    Empty,
    Endpoint,
    Id,
    Message,
    Priority,
    Readers,
    Request,
    Seconds,
    Secret,
    Size,
    Text,
    Tokens,
)

Tables = Annotated[dict[Id, BlockTable], msgspec.Meta(max_length=64)]
Ranks = Annotated[tuple[Index, ...], msgspec.Meta(min_length=1, max_length=1024)]
Clock = float
"""Seconds of CLOCK_MONOTONIC: an engine and its agent share a machine, and so this clock.

It is for spans alone: a time that cannot be true, as in another time namespace, is ignored.
"""


class AgentRole(StrEnum):
    """Which side of a handoff an agent serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """How an offer or a fetch ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


class AgentRanks(Discreet, frozen=True):
    """The peer endpoint of another agent, and the ranks of an engine that are attached there.

    ``access`` is what their sessions said in `Register`: who shows it there may ask about them.
    ``server_key`` is that agent's CURVE key, in Z85; empty when it has none.
    """

    endpoint: Endpoint
    ranks: Ranks
    access: Secret
    server_key: Text = ""


class Register(Request[Empty], frozen=True):
    """Registers this session: as the engine's control session, or as the memory of one rank.

    Every session of an engine states the same ``engine``. The control session names the ranks that
    are attached to ``others``; the agent that it is with is the engine's home. The control session
    gets the notices of the engine; with ``notices`` the session of a rank at home is told, too, how
    each fetch ended. A rank that is not at home is asked about by who shows its ``access``. An
    engine that says its ``role`` is refused by an agent of the other one.
    """

    op: ClassVar[str] = "register"

    engine: EngineSpec
    rank: RankSpec | None = None
    others: Annotated[tuple[AgentRanks, ...], msgspec.Meta(max_length=1024)] = ()
    notices: bool = False
    access: Secret | None = None
    role: AgentRole | None = None


class AwaitReady(Request[Empty], frozen=True):
    """Answered once the control session and every rank of the engine are registered."""

    op: ClassVar[str] = "ready"


class Detach(Request[Empty], frozen=True):
    """Says that this session's end is meant; its end-of-file on the attach socket follows."""

    op: ClassVar[str] = "detach"


class OfferMade(Message, frozen=True):
    """Reply to `MakeOffer`; the ticket goes to the decode engine, unchanged, by any way.

    But for one thing: of an open offer the engine itself may name the blocks in it, at most
    ``ticket_blocks``, and their ``num_tokens``, once it has written the last of them.
    """

    offer_id: Id
    ticket: dict[str, Any]
    ticket_blocks: Size = 0


class MakeOffer(Request[OfferMade], frozen=True):
    """Publishes the KV of one request; block tables by group, ``num_tokens`` of them ready.

    The blocks stay untouched until the notice `Released`. ``ttl_s`` is how long the offer waits
    for a reader; a live lease outlasts it. ``audience`` is the one decode engine or agent that may
    use the ticket, ``prompt_digest`` what the prompt is known by; empty when it does not matter.
    Whoever shows ``transfer_id``, a secret that a router has made, is given the ticket. The blocks
    are released when so many ``readers`` have read them, or at the end of ``ttl_s`` when fewer did.
    ``traceparent`` is the trace of the request (`TraceParent`); what is none is ignored.
    ``asked_s`` is when the engine asked, see `Clock`.
    """

    op: ClassVar[str] = "offer"

    request_id: Id
    num_tokens: Tokens
    tables: Tables
    sealed: bool = True
    ttl_s: Seconds | None = None
    audience: Text = ""
    prompt_digest: Text = ""
    transfer_id: Secret | None = None
    readers: Readers = 1
    traceparent: Text = ""
    asked_s: Clock | None = None


class ExtendOffer(Request[Empty], frozen=True):
    """More of an open offer: ``tables`` hold only the new blocks, ``num_tokens`` is the new sum."""

    op: ClassVar[str] = "extend"

    offer_id: Id
    num_tokens: Tokens
    tables: Tables = msgspec.field(default_factory=dict)


class SealOffer(Request[Empty], frozen=True):
    """The offer has all its tokens."""

    op: ClassVar[str] = "seal"

    offer_id: Id


class WithdrawOffer(Request[Empty], frozen=True):
    """Ends an offer now; a lease on it is revoked, its reader fails with ``offer_withdrawn``."""

    op: ClassVar[str] = "withdraw"

    offer_id: Id


class Released(Message, frozen=True):
    """Notice: the offer ended, no lease on it is live, its blocks are the engine's again."""

    op: ClassVar[str] = "released"

    offer_id: Id
    request_id: Id
    outcome: Outcome


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds spent in each stage of a fetch; a stage that was not reached is 0."""

    resolving: float = 0.0
    claiming: float = 0.0
    waiting: float = 0.0
    reading: float = 0.0
    taking: float = 0.0
    queued: float = 0.0
    meeting: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from the request to the end."""
        spent_s: tuple[float, ...] = msgspec.structs.astuple(self)
        return sum(spent_s)


class Fetched(Message, frozen=True):
    """Reply to `StartFetch`: the fetch ended. Only ``completed`` means that the KV may be used.

    It is a notice, too, for sessions of ranks that asked for it, see `Register`.
    ``blocks_free`` is False while a transfer can still write into the blocks: they stay with the
    agent until the notice `BlocksFreed`. ``whole_blocks`` is False where the first block of a
    window has a gap: tokens that were asked for, in front of the window, which the prefill engine
    does not keep as its blocks are smaller. An engine that caches whole blocks must not cache that.
    """

    op: ClassVar[str] = "fetched"

    fetch_id: Id
    request_id: Text
    outcome: Outcome
    stage: Id
    blocks_free: bool
    code: Text = ""
    message: Text = ""
    num_bytes: Size = 0
    path: Text = ""
    stages_s: StageTimes = StageTimes()
    whole_blocks: bool = False


class StartFetch(Request[Fetched], frozen=True):
    """Asks for tokens [first_token, num_tokens) of a ticket's request, into ``tables``.

    The ``ticket`` may be a `Rendezvous` instead: then the fetch waits until there is one.

    ``tables`` hold exactly the blocks of these tokens: of a group with a window those of its last
    ``window`` tokens, of a state the one block. With ``zero_tail`` the unused slots of the last
    block are zeroed, else they stay as they were. It is answered when it has ended, within
    ``timeout_s``; refused, it was not begun. With ``chunk_tokens`` the tokens are read in chunks
    that end at multiples of it, and a notice `Landed` tells of each. With ``prompt_digest`` the
    ticket has to be of that prompt. Fetches of a greater ``priority`` come first. ``traceparent``
    is the trace of the request; that of the ticket without one. ``asked_s`` is when the engine
    asked, see `Clock`, and ``wanted_s`` since when it has had the request, which waited for its
    turn there.
    """

    op: ClassVar[str] = "fetch"
    at_once: ClassVar[bool] = True

    fetch_id: Id
    ticket: dict[str, Any]
    num_tokens: Tokens
    tables: Tables
    first_token: Tokens = 0
    timeout_s: Seconds | None = None
    zero_tail: bool = False
    chunk_tokens: Tokens = 0
    prompt_digest: Text = ""
    priority: Priority = 0
    traceparent: Text = ""
    asked_s: Clock | None = None
    wanted_s: Clock | None = None


class CancelFetch(Request[Empty], frozen=True):
    """Ends a fetch; the answer to it says ``cancelled``, or what it became first.

    With ``release_offer`` nobody will fetch what the ticket names any more: unless the fetch
    completed, its offer is withdrawn, also when the fetch has ended by now.
    """

    op: ClassVar[str] = "cancel"

    fetch_id: Id
    release_offer: bool = False


class Landed(Message, frozen=True):
    """Notice: tokens [first_token, num_tokens) of a fetch are in its blocks.

    They are valid only when `Fetched` says ``completed``. An engine may copy them elsewhere before.
    """

    op: ClassVar[str] = "landed"

    fetch_id: Id
    num_tokens: Tokens


class BlocksFreed(Message, frozen=True):
    """Notice: nothing can write into the blocks of an ended fetch any more."""

    op: ClassVar[str] = "blocks_freed"

    fetch_id: Id


class Leaving(Message, frozen=True):
    """Notice: the agent ends. What has no answer by now was not begun, and another may be asked."""

    op: ClassVar[str] = "leaving"


class Ping(Request[Empty], frozen=True):
    """Asks for a sign of life, on any request socket; a new boot id in the reply tells the rest."""

    op: ClassVar[str] = "ping"


ENGINE_REQUESTS: tuple[type[Request[Any]], ...] = (
    Register,
    AwaitReady,
    Detach,
    Ping,
)
PREFILL_REQUESTS: tuple[type[Request[Any]], ...] = (
    MakeOffer,
    ExtendOffer,
    SealOffer,
    WithdrawOffer,
)
DECODE_REQUESTS: tuple[type[Request[Any]], ...] = (StartFetch, CancelFetch)
NOTICES: tuple[type[Message], ...] = (Released, Landed, Fetched, BlocksFreed, Leaving)
