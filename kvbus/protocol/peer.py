"""Messages on the peer socket of an agent.

Any other process than ``agent_boot`` refuses a request with ``stale``.
"""

from typing import Annotated, Any, Literal

import msgspec

from kvbus.geometry import BlockTable, EngineSpec, RankSpec, Tile
from kvbus.geometry.spec import Index
from kvbus.protocol.attach import MemorySocket
from kvbus.protocol.engine import ORDERED, AgentRanks, Ranks, Tables
from kvbus.protocol.message import (
    OFFER_ENDED,
    AgentBoot,
    AgentId,
    Empty,
    Endpoint,
    EngineId,
    Epoch,
    Id,
    MaxProtocol,
    MemoryId,
    Message,
    MinProtocol,
    OfferId,
    Priority,
    Protocol,
    RankSecret,
    Redacted,
    Request,
    Role,
    Seconds,
    Secret,
    SequenceNumber,
    Size,
    Socket,
    Text,
    Tokens,
    request,
)

OF_OFFER = f"stale forbidden offer_unknown {OFFER_ENDED}"
Address = Annotated[int, msgspec.Meta(ge=0, le=2**62 - 1)]  # with an offset, still 64 bits, signed
OfferSecret = Secret
"""From the ticket."""
LeaseToken = Secret
"""From the reply to ``acquire``."""
ReaderId = Id
"""New for each fetch."""
ReaderAgent = Text
"""Its agent, whose earlier leases with another ``reader_boot`` end."""
ReaderBoot = Text
TransferId = Secret
"""Name of the offer, and the right to its ticket."""
HolderRank = Index
TileTable = BlockTable
"""Exactly the blocks of the tile's positions."""
TicketMap = dict[str, Any]
ReadEngine = Annotated[str, msgspec.Meta(max_length=256)]
SlotId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""Never used again."""
SlotIds = Annotated[tuple[SlotId, ...], msgspec.Meta(max_length=1024)]
BackendName = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
MemoryKind = Literal["DRAM", "VRAM"]
_UCX = "UCX"
MAX_BACKENDS = 8
MAX_COMMITS = 64
"""Offers in one message: to end them occupies the agent's event loop for about 3 ms."""
MAX_HELD = 1024
"""Offers in one message: to renew them occupies the agent's event loop for about 3 ms."""
MAX_DIGESTS = 1 << 17
"""Digests in one request; they take 1 MiB."""
OneIn = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
"""1 for all pieces; N for about one piece in N."""


class EngineMemory(msgspec.Struct, frozen=True):
    """Ranks of one engine at one agent."""

    engine: EngineSpec
    ranks: Annotated[tuple[RankSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]
    addresses: tuple[dict[str, Address], ...] = ()
    """For each of ``ranks``: by ``segment_id``, the address in the agent's data process; empty if
    *unregistered*."""


class HandshakeDone(Message, frozen=True):
    """Reply to `Handshake`: the prefill engine's memory, and what NIXL needs to read it."""

    protocol: Protocol
    agent_id: AgentId
    memory: EngineMemory
    memory_id: Id
    """Id of the processes that hold these ranks."""
    nixl_agent: Id
    nixl_metadata: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    """From ``getLocalPartialMD``, for each kind of memory. Empty for a ``machine`` that maps the
    memory."""
    events_endpoint: Endpoint
    """Events socket of the agent."""
    max_lease_s: Seconds
    rank_secret: Secret
    """For ``pack``, ``digest``, ``check`` and ``lend`` here."""
    slot_bytes: Size = 0
    """Largest tile; 0 if the agent packs nothing."""
    remote_ranks: tuple[AgentRanks, ...] = ()
    """From the home: the other agents with ranks of the engine."""
    memory_socket: MemorySocket = MemorySocket()
    """For agents of the same machine and user."""
    grant: Text = ""
    """With keys: for ``lend``, whose connection it ties to the key of this one."""
    nixl_backend: BackendName = _UCX
    """The first of ``nixl_backends`` that this agent has."""
    slot_memory: Annotated[tuple[MemoryKind, ...], msgspec.Meta(max_length=2)] = ()
    """NIXL's kinds of memory of the staging slots."""


@request(
    "handshake",
    Socket.PREFILL_PEER,
    refusals=f"unsupported_version {OF_OFFER} offer_parked engine_unknown engine_not_ready "
    "incompatible geometry transfer_failed busy",
)
class Handshake(Request[HandshakeDone], frozen=True):
    """Introduce a decode engine to each agent with ranks of a prefill engine. Repeat it after a
    restart of that agent's processes. Without ``offer_id`` and ``secret`` it is *ahead* of the
    first ticket: ``shake_hands_ahead`` controls which agents may send this.
    """

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    agent_id: Id
    engine_id: Id
    """The prefill engine, from the ticket or the status."""
    reader: EngineSpec
    """The decode engine."""
    engine_instance: Text = ""
    """From the same source. Empty with ``ranks``."""
    offer_id: Text = ""
    """From the ticket. Empty with ``ranks``, and ahead of a ticket."""
    secret: Secret | None = None
    """Likewise."""
    ranks: Annotated[tuple[Size, ...], msgspec.Meta(max_length=1024)] = ()
    """To an agent that is not the home: its ranks, from the home's ``remote_ranks``."""
    rank_secret: Secret | None = None
    """From the same entry."""
    machine: Text = ""
    """Boot id of the kernel; empty without mapping."""
    nixl_backends: Annotated[
        tuple[BackendName, ...], msgspec.Meta(min_length=1, max_length=MAX_BACKENDS)
    ] = (_UCX,)
    """The decode agent's, the preferred one first. Without a common one: ``incompatible``."""


class Granted(Message, frozen=True):
    """Reply to `Acquire` and `Renew`: the lease, and the readable part of the offer."""

    epoch: Epoch
    lease_s: Seconds
    """The agent counts from when it *received* the request, a reader from when it *sent* it."""
    num_tokens: Tokens
    """May be read now."""
    sealed: bool
    tables: Tables
    """The blocks after ``known_blocks``."""
    token: Secret
    after: SequenceNumber = 0
    """GPU work that computes these tokens. It has ended at the home; see ``await_work``."""


@request("acquire", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} offer_parked busy")
class Acquire(Request[Granted], frozen=True):
    """Acquire a lease of an offer; at most as many are live as ``readers`` are left. The same
    ``reader_id``, or a new process of its agent, gets a new epoch, and the old lease ends.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    lease_s: Seconds
    """Wanted."""
    secret: OfferSecret
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    engine_id: ReadEngine = ""
    """The ticket's engine, or the pool."""
    part: bool = False
    """The reader is not the home of its engine, and does not count as one of the ``readers``. An
    offer has at most 1,024 of these leases."""


@request("renew", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Renew(Request[Granted], frozen=True):
    """Extend a live lease, and get the tokens and blocks that were added."""

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    lease_s: Seconds
    """Wanted from now on. A renewal never shortens a lease."""
    token: LeaseToken
    known_blocks: dict[str, Size] = msgspec.field(default_factory=dict)
    """By group: number of blocks that the reader knows."""
    nixl_agent: Text = ""
    """From the handshake. If the agent has another one now: ``stale``, as a READ may never end."""


@request(
    "commit",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals=f"{OF_OFFER} offer_open offer_parked lease_expired busy geometry",
)
class Commit(Request[Empty], frozen=True):
    """Confirm the read after the last byte has landed: the bytes are valid only if the reply is
    ``ok``. A commit ends the lease, and the last one the offer. A repeat with the same ``token``
    succeeds again.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    secret: OfferSecret
    token: Secret
    """Random, new for each fetch."""
    tables: Tables | None = None
    """Without a live lease: the block tables that were read, as in the ticket's ``blocks``. If
    these or the next two differ from the offer's: ``geometry``."""
    num_tokens: Tokens = 0
    """As in the ticket."""
    engine_id: ReadEngine = ""
    """As in the ticket, or the pool."""
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    part: bool = False
    """The commit ends the lease, but not the offer."""
    nixl_agent: Text = ""
    """The one that was read from; empty without NIXL. If the agent has another one now: ``stale``.
    """


@request("commits", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class ReportCommits(Request[Empty], frozen=True):
    """Report offers that were committed by their cells. The agent also checks all cells once a
    second.
    """

    agent_boot: AgentBoot
    tokens: Annotated[dict[OfferId, Secret], msgspec.Meta(max_length=MAX_COMMITS)]
    """By offer, the token in its cell."""


class CommitAnswer(Message, frozen=True):
    committed: bool
    """By ``commit`` or by a swap of the cell."""
    num_tokens: Tokens = 0
    """Tokens of the offer, if committed."""


@request(
    "committed",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals="forbidden engine_not_ready",
)
class CommitQuery(Request[CommitAnswer], frozen=True):
    """Check whether an earlier process of this decode agent committed the offer. Any process of the
    prefill agent answers. After a negative reply, only ``reader_boot`` may commit with this token.
    While the agent waits for the engine's offers: ``engine_not_ready``.
    """

    secret: OfferSecret
    """From the ticket, or ``transfer_id`` of a rendezvous."""
    token: Secret
    reader_boot: Id
    offer_id: Text = ""
    """From the ticket, like the next two; empty for a rendezvous."""
    engine_id: Text = ""
    engine_instance: Text = ""


class HeldOffer(Redacted, frozen=True):
    """An offer for ``keep_offers``."""

    secret: Secret
    """From the ticket, or ``transfer_id`` of the rendezvous."""
    offer_id: Text = ""
    """Empty for a rendezvous."""


class OffersKept(Message, frozen=True):
    keep_s: Seconds
    """Granted. Repeat the request earlier."""
    over: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    """Positions in ``offers`` of those not kept: ended, unknown, with another ``secret``, or kept
    too long."""


@request("keep_offers", Socket.PREFILL_PEER, at_once=True)
class KeepOffers(Request[OffersKept], frozen=True):
    """Keep offers for readers in a queue, for ``max_hold_s`` after the first of these requests at
    most. The offer of a rendezvous is kept as soon as the engine makes it. Any process of the
    prefill agent answers. While it waits for its engines' offers, unknown ones are not ``over``.
    """

    offers: Annotated[tuple[HeldOffer, ...], msgspec.Meta(max_length=MAX_HELD)]
    keep_s: Seconds
    """Wanted."""


@request("release", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Release(Request[Empty], frozen=True):
    """Release a lease, with nothing in flight and nothing used."""

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    token: LeaseToken
    code: Id


@request(
    "withdraw",
    Socket.PREFILL_PEER,
    allowed_roles=(Role.DECODE, Role.ROUTER),
    at_once=True,
    refusals="stale forbidden offer_unknown engine_not_ready",
)
class PeerWithdraw(Request[Empty], frozen=True):
    """Withdraw the offer of an aborted request; for routers."""

    agent_boot: AgentBoot
    offer_id: OfferId
    secret: OfferSecret


class AwaitedOffer(Message, frozen=True):
    ticket: TicketMap


@request(
    "await_offer",
    Socket.PREFILL_PEER,
    refusals="busy engine_lost engine_not_ready cancelled offer_withdrawn offer_expired "
    "offer_completed draining",
)
class AwaitOffer(Request[AwaitedOffer], frozen=True):
    """Wait for the ticket of a [rendezvous](#rendezvous). The agent refuses with ``busy`` after
    ``wait_s``, and with ``engine_not_ready`` when no engine has been ready for 2 s.
    """

    transfer_id: TransferId
    wait_s: Seconds


@request("decline", Socket.PREFILL_PEER, refusals="busy offer_unknown draining")
class Decline(Request[Empty], frozen=True):
    """Declare that the offer of this name will not be read. The agent withdraws it, or refuses it
    later (``cancelled``).
    """

    transfer_id: TransferId


@request("cancel_request", Socket.PREFILL_PEER, at_once=True)
class CancelRequest(Request[Empty], frozen=True):
    """Abandon an earlier request of this session, such as ``await_offer``: the agent refuses it
    with ``cancelled``, and frees its place.
    """

    request_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Its ``id``."""


class Packed(Message, frozen=True):
    """Reply to `Pack`. Bytes read after the end of the slot's lease are not valid."""

    slot_id: SlotId
    address: Address
    """Within ``nixl_metadata``."""
    num_bytes: Size
    slot_lease_s: Seconds
    """Time that the slot stays the reader's, while the lease lives; counted as ``lease_s``."""
    memory: MemoryKind = "DRAM"
    """NIXL's kind of memory."""
    device: Index = 0
    """NIXL's device number."""


@request(
    "pack",
    Socket.PREFILL_PEER,
    refusals="stale forbidden offer_unknown offer_open lease_expired offer_withdrawn offer_expired "
    "engine_lost draining geometry timeout config transfer_failed",
)
class Pack(Request[Packed], frozen=True):
    """Gather a tile of one rank into a staging slot; see [Packed reads](#packed-reads). The reply
    may wait for a slot.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    epoch: Epoch
    """Only the home checks it here; for other agents, the ``commit`` does."""
    rank: HolderRank
    tile: Tile
    """At most ``slot_bytes``."""
    table: TileTable
    slot_lease_s: Seconds
    """Wanted to wait, gather and read."""
    token: Secret
    """From the reply to ``acquire``; only the home checks it."""
    rank_secret: RankSecret
    done: SlotIds = ()
    """Slots that were read: freed even if the request is refused."""
    priority: Priority = 0


@request("unpack", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class Unpack(Request[Empty], frozen=True):
    """Release staging slots."""

    agent_boot: AgentBoot
    slot_ids: SlotIds


class Digests(Message, frozen=True):
    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DIGESTS)]
    """8 bytes for each chosen piece, in order, little-endian."""


@request(
    "digest",
    Socket.PREFILL_PEER,
    refusals=f"{OF_OFFER} offer_open offer_parked geometry transfer_failed",
)
class Digest(Request[Digests], frozen=True):
    """Get [digests](#digests) of a tile as one rank holds it now."""

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    """Also selects the pieces."""
    rank: HolderRank
    tile: Tile
    """At most 131,072 pieces."""
    table: TileTable
    one_in: OneIn
    secret: OfferSecret
    """From the ticket; only the home checks it."""
    rank_secret: RankSecret


@request("check", Socket.PREFILL_PEER, at_once=True, refusals="stale forbidden engine_lost")
class CheckMemory(Request[Empty], frozen=True):
    """Check that the ranks at this agent are still those of the handshake. Send it to agents other
    than the home: before the read, with each renewal, and after the last byte. Send it to any agent
    while a read drains, and after mapped memory has gone.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    rank_secret: RankSecret
    offer_id: Text = ""
    """That is or was read."""
    progress_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Time for which the agent drives reads of the offer."""
    nixl_agent: Text = ""
    """As in ``commit``."""


@request(
    "await_work",
    Socket.PREFILL_PEER,
    refusals=f"stale forbidden engine_lost busy {ORDERED}",
)
class AwaitWork(Request[Empty], frozen=True):
    """Wait until the ranks of an engine at this agent have reached the number of a grant."""

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    rank_secret: RankSecret
    after: SequenceNumber
    """From the reply to ``acquire``."""


class PartFetched(Message, frozen=True):
    """Reply to `FetchPart`: nothing of the part is in flight at this agent any longer. Without a
    ``code``, all of it was read and committed.
    """

    num_bytes: Size
    path: Text
    code: Text = ""
    message: Text = ""


@request(
    "fetch_part",
    Socket.DECODE_PEER,
    refusals="engine_unknown engine_not_ready geometry unsupported_version draining busy "
    f"engine_lost {ORDERED}",
)
class FetchPart(Request[PartFetched], frozen=True):
    """Fetch into remote ranks, at the request of the home; see [Engines with several
    agents](#messages-between-their-agents). Fields and replies of ``fetch`` mean the same. A repeat
    with the same ``token`` waits for the same reply.
    """

    token: Secret
    """The right to this part, new for each."""
    fetch_id: Id
    engine_id: EngineId
    rank_secret: Secret
    """From ``remote_ranks`` of the control session."""
    ranks: Ranks
    ticket: TicketMap
    memory_ids: Annotated[tuple[Id, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """The ``memory_id`` of the prefill engine's home, then of each of ``remote_ranks``. An agent
    that knows others shakes hands again."""
    num_tokens: Tokens
    tables: Tables
    timeout_s: Seconds
    first_token: Tokens = 0
    zero_tail: bool = False
    priority: Priority = 0
    traceparent: Text = ""
    """As in ``fetch``."""
    pool_id: ReadEngine = ""
    """Pool of a parked offer; empty for the ticket's engine."""
    pool_instance: Text = ""
    origin: Secret | None = None
    """Name of all parts that this process of the home requests from this agent in one fetch."""
    after: SequenceNumber = 0


@request("cancel_part", Socket.DECODE_PEER, refusals="busy")
class CancelPart(Request[Empty], frozen=True):
    """Cancel a part. The reply comes when nothing of it is in flight; the reply to its
    ``fetch_part`` is then ``cancelled``, or that of the part. A second request makes the agent
    refuse the first one with ``busy``.
    """

    token: Secret
    """The part's ``token``, or its ``origin``: a new process of the home ends earlier parts."""
