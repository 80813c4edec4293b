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
"""Secret from the offer's ticket."""
LeaseToken = Secret
"""The right to the lease, from the reply to ``acquire``."""
ReaderId = Id
"""Id of the reader, unique for each fetch of each agent."""
ReaderAgent = Text
"""Id of the reader's agent. The request ends an earlier lease of the same agent and key with
another ``reader_boot``."""
ReaderBoot = Text
"""Boot id of the reader's agent."""
TransferId = Secret
"""Name of the offer, and the right to its ticket."""
HolderRank = Index
"""Number of the rank that holds the tile."""
TileTable = BlockTable
"""Exactly the blocks of the tile's positions, with the block ids of the offer."""
TicketMap = dict[str, Any]
"""The [ticket](#ticket)."""
ReadEngine = Annotated[str, msgspec.Meta(max_length=256)]
SlotId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""Id of this use of a slot, never used again."""
SlotIds = Annotated[tuple[SlotId, ...], msgspec.Meta(max_length=1024)]
"""Ids of the uses of slots."""
BackendName = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
"""Name of a backend of NIXL."""
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
    """Ranks of one engine that are attached to one agent."""

    engine: EngineSpec
    """Spec of the engine."""
    ranks: Annotated[tuple[RankSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """Its ranks at this agent, in order of their numbers."""
    addresses: tuple[dict[str, Address], ...] = ()
    """For each of ``ranks``, the address of each segment in the agent's data process, by
    ``segment_id``. An *unregistered* rank has an empty map."""


class HandshakeDone(Message, frozen=True):
    """Reply to `Handshake`: the prefill engine's memory, and what NIXL needs to read it."""

    protocol: Protocol
    agent_id: AgentId
    memory: EngineMemory
    """The prefill engine, its ranks at this agent, and their addresses."""
    memory_id: Id
    """Id of the set of processes that hold these ranks."""
    nixl_agent: Id
    """Name of the NIXL agent that owns the memory."""
    nixl_metadata: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    """Blobs from NIXL's ``getLocalPartialMD``, one for each kind of memory. Empty for a ``machine``
    that maps the memory."""
    events_endpoint: Endpoint
    """ZeroMQ endpoint of the prefill agent's events socket."""
    max_lease_s: Seconds
    """Longest lease that one acquire or renewal grants."""
    rank_secret: Secret
    """Credential for ``pack``, ``digest``, ``check`` and ``lend`` at this agent."""
    slot_bytes: Size = 0
    """Size of a staging slot, and so of the largest tile; 0 if the agent packs nothing."""
    remote_ranks: tuple[AgentRanks, ...] = ()
    """Engine's home only: the other agents that have ranks of it."""
    memory_socket: MemorySocket = MemorySocket()
    """Socket where an agent of the same machine and user gets this memory."""
    grant: Text = ""
    """With keys only: credential for ``lend``. It ties that connection to the key of this one."""
    nixl_backend: BackendName = _UCX
    """Backend that reads this memory: the first of ``nixl_backends`` that this agent has. The
    ``nixl_metadata`` is for this backend only."""
    slot_memory: Annotated[tuple[MemoryKind, ...], msgspec.Meta(max_length=2)] = ()
    """NIXL's kinds of the memory of the staging slots for these ranks; empty if there are none, or
    the memory is mapped."""


@request(
    "handshake",
    Socket.PREFILL_PEER,
    refusals=f"unsupported_version {OF_OFFER} offer_parked engine_unknown engine_not_ready "
    "incompatible geometry transfer_failed busy",
)
class Handshake(Request[HandshakeDone], frozen=True):
    """Introduce a decode engine to a prefill engine. The decode agent sends it to each agent with
    ranks of the prefill engine, and again after a restart of that agent or of its data process. A
    handshake without ``offer_id`` and ``secret`` is *ahead* of the first ticket;
    ``shake_hands_ahead`` controls which agents may send one.
    """

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    agent_id: Id
    """Id of the decode agent."""
    engine_id: Id
    """The prefill engine, from the ticket or from the status."""
    reader: EngineSpec
    """Spec of the decode engine."""
    engine_instance: Text = ""
    """Instance of the prefill engine, from the same source. Empty with ``ranks``."""
    offer_id: Text = ""
    """The offer, from the ticket. Empty with ``ranks``, and ahead of a ticket."""
    secret: Secret | None = None
    """Secret from the ticket. Nil with ``ranks``, and ahead of a ticket."""
    ranks: Annotated[tuple[Size, ...], msgspec.Meta(max_length=1024)] = ()
    """To an agent that is not the home: its ranks, from ``remote_ranks`` of the home."""
    rank_secret: Secret | None = None
    """With ``ranks``: the ``rank_secret`` of this agent, from ``remote_ranks`` of the home."""
    machine: Text = ""
    """Boot id of the decode agent's kernel; empty if the agent cannot map memory."""
    nixl_backends: Annotated[
        tuple[BackendName, ...], msgspec.Meta(min_length=1, max_length=MAX_BACKENDS)
    ] = (_UCX,)
    """Backends of the decode agent's NIXL, the preferred one first. If the prefill agent has none
    of them, it refuses with ``incompatible``."""


class Granted(Message, frozen=True):
    """Reply to `Acquire` and `Renew`: the lease, and the readable part of the offer."""

    epoch: Epoch
    """Epoch of the lease; it grows with each acquire of an offer."""
    lease_s: Seconds
    """Duration of the lease. The agent counts from when it *received* the request, a reader from
    when it *sent* it."""
    num_tokens: Tokens
    """Number of tokens that may be read now."""
    sealed: bool
    """Whether these are all tokens of the offer."""
    tables: Tables
    """By group, the blocks after ``known_blocks``."""
    token: Secret
    """The right to the lease."""
    after: SequenceNumber = 0
    """Number of the GPU work that computes these tokens. It has ended at the engine's home; send it
    to each other agent with ``await_work``."""


@request("acquire", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} offer_parked busy")
class Acquire(Request[Granted], frozen=True):
    """Acquire a lease of an offer. At most as many leases are live as ``readers`` are left. The
    same ``reader_id``, or a new process of the agent that had the lease, gets a new epoch, and the
    old lease ends.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    lease_s: Seconds
    """Seconds wanted; the agent may grant fewer."""
    secret: OfferSecret
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    engine_id: ReadEngine = ""
    """Engine whose memory the reader is going to read: that of the ticket, or the pool."""
    part: bool = False
    """Whether the reader is an agent of a decode engine other than its home. It does not count as
    one of the ``readers``. An offer has at most 1,024 of these leases."""


@request("renew", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Renew(Request[Granted], frozen=True):
    """Extend a live lease, and get the tokens and blocks that were added to the offer."""

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    lease_s: Seconds
    """Seconds wanted from now on. A renewal never shortens a lease."""
    token: LeaseToken
    known_blocks: dict[str, Size] = msgspec.field(default_factory=dict)
    """Number of blocks of each group that the reader knows."""
    nixl_agent: Text = ""
    """The ``nixl_agent`` of the handshake. If the agent has another one now, the request is
    ``stale``: a READ from the old one may never end."""


@request(
    "commit",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals=f"{OF_OFFER} offer_open offer_parked lease_expired busy geometry",
)
class Commit(Request[Empty], frozen=True):
    """Confirm the read after the last byte has landed. The bytes are valid only if the reply is
    ``ok``. A commit ends the reader's lease, and completes the offer if this was the last reader. A
    repeat with the same ``token`` succeeds again.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    secret: OfferSecret
    token: Secret
    """Random token of the reader, new for each fetch. A repeated commit has the same one."""
    tables: Tables | None = None
    """Block tables that were read, as in ``blocks`` of the ticket; ``geometry`` if the offer has
    other tables. A reader with a live lease omits this field and the next two."""
    num_tokens: Tokens = 0
    """Tokens of the ticket; ``geometry`` if the offer has another number."""
    engine_id: ReadEngine = ""
    """Engine of the ticket, or the pool; ``geometry`` if the offer has another one."""
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    part: bool = False
    """As in ``acquire``: the commit ends the lease, but not the offer."""
    nixl_agent: Text = ""
    """The ``nixl_agent`` of the handshake that was read from; empty if nothing was read with NIXL.
    If the agent has another one now, the request is ``stale``."""


@request("commits", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class ReportCommits(Request[Empty], frozen=True):
    """Report offers that were committed by their cells. The agent ignores offers that were not.

    It also checks all cells once a second: a lost report delays the end of the offer only.
    """

    agent_boot: AgentBoot
    tokens: Annotated[dict[OfferId, Secret], msgspec.Meta(max_length=MAX_COMMITS)]
    """By offer, the token in its cell."""


class CommitAnswer(Message, frozen=True):
    committed: bool
    """Whether a ``commit`` with this token, or a swap of the offer's cell, completed the read."""
    num_tokens: Tokens = 0
    """Tokens of the offer, if committed."""


@request(
    "committed",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals="forbidden engine_not_ready",
)
class CommitQuery(Request[CommitAnswer], frozen=True):
    """Check whether an earlier process of this decode agent committed the offer, before the fetch
    is repeated. Any process of the prefill agent answers, so there is no ``agent_boot``.

    After a negative reply, only ``reader_boot`` may commit the offer with this token: a later
    ``commit`` of another process is ``stale``. An unknown offer is not committed. The agent refuses
    with ``engine_not_ready`` while it waits for the engine's offers.
    """

    secret: OfferSecret
    """Secret of the ticket; for a rendezvous, its ``transfer_id``."""
    token: Secret
    """Token of the ``commit``."""
    reader_boot: Id
    """Boot id of the reader's agent."""
    offer_id: Text = ""
    """The offer, from the ticket; empty for a rendezvous."""
    engine_id: Text = ""
    """The prefill engine, from the ticket; empty for a rendezvous."""
    engine_instance: Text = ""
    """Its instance, from the ticket; empty for a rendezvous."""


class HeldOffer(Redacted, frozen=True):
    """An offer that a decode engine holds, as a request in its queue needs it."""

    secret: Secret
    """Secret of the ticket, or ``transfer_id`` of the rendezvous."""
    offer_id: Text = ""
    """Id of the offer; empty for a rendezvous."""


class OffersKept(Message, frozen=True):
    keep_s: Seconds
    """Seconds from now for which the agent keeps the offers. Repeat the request earlier."""
    over: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    """Positions in ``offers`` of those that the agent does not keep: they have ended, are unknown,
    have another ``secret``, or were held for ``max_hold_s``."""


@request("keep_offers", Socket.PREFILL_PEER, at_once=True)
class KeepOffers(Request[OffersKept], frozen=True):
    """Keep offers whose readers wait in the queue of a decode engine. The agent adds no time to an
    offer that has more left, and keeps it for ``max_hold_s`` after the first of these requests, at
    most. It keeps the offer of a rendezvous from the moment at which the engine makes it.

    Any process of the prefill agent answers, so there is no ``agent_boot``. An agent that waits for
    its engines to publish their offers again does not count unknown offers as ``over``.
    """

    offers: Annotated[tuple[HeldOffer, ...], msgspec.Meta(max_length=MAX_HELD)]
    """Offers to keep."""
    keep_s: Seconds
    """Seconds wanted; the agent may grant fewer."""


@request("release", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Release(Request[Empty], frozen=True):
    """Release a lease, with nothing in flight and nothing used."""

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    token: LeaseToken
    code: Id
    """Reason, as an error code."""


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
    """Wait for the ticket of a [rendezvous](#rendezvous). The reply comes as soon as there is one.
    The agent refuses with ``busy`` after ``wait_s``, and with ``engine_not_ready`` when no engine
    has been ready for 2 s.
    """

    transfer_id: TransferId
    wait_s: Seconds
    """Seconds that the agent may take to reply."""


@request("decline", Socket.PREFILL_PEER, refusals="busy offer_unknown draining")
class Decline(Request[Empty], frozen=True):
    """Declare that the offer of this name will not be read. The agent withdraws it. If the engine
    makes it later, the agent refuses it (``cancelled``).
    """

    transfer_id: TransferId


@request("cancel_request", Socket.PREFILL_PEER, at_once=True)
class CancelRequest(Request[Empty], frozen=True):
    """Stop waiting for the reply to an earlier request of this session. The agent frees the
    resources of that request, and refuses it with ``cancelled``. Without this, an abandoned
    ``await_offer`` occupies its place until the end of ``wait_s``.
    """

    request_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """The ``id`` of that request. No effect if it was answered or never arrived."""


class Packed(Message, frozen=True):
    """Reply to `Pack`. Bytes read after the end of the slot's lease are not valid."""

    slot_id: SlotId
    address: Address
    """Start of the tile in the agent's data process, within ``nixl_metadata``."""
    num_bytes: Size
    """Size of the tile."""
    slot_lease_s: Seconds
    """Seconds that the slot stays the reader's, while the lease lives; counted as ``lease_s``."""
    memory: MemoryKind = "DRAM"
    """NIXL's kind of the slot's memory: ``DRAM`` of the host, or ``VRAM`` of a GPU."""
    device: Index = 0
    """NIXL's device number of the slot, in the prefill agent's data process."""


@request(
    "pack",
    Socket.PREFILL_PEER,
    refusals="stale forbidden offer_unknown offer_open lease_expired offer_withdrawn offer_expired "
    "engine_lost draining geometry timeout config transfer_failed",
)
class Pack(Request[Packed], frozen=True):
    """Gather a tile of one rank into a staging slot; see [Packed reads](#packed-reads). The reply
    comes when the tile is gathered, which may wait for a slot.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    epoch: Epoch
    """Epoch of the lease. Only the engine's home checks it here; for other agents, the ``commit``
    does."""
    rank: HolderRank
    tile: Tile
    """Tile to gather, of at most ``slot_bytes``."""
    table: TileTable
    slot_lease_s: Seconds
    """Seconds wanted to wait, gather and read; the agent may grant fewer."""
    token: Secret
    """The right to the lease; only the engine's home can check it."""
    rank_secret: RankSecret
    done: SlotIds = ()
    """Slots that were read. The agent frees them even if it refuses the rest."""
    priority: Priority = 0


@request("unpack", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class Unpack(Request[Empty], frozen=True):
    """Release staging slots that were read or are not wanted."""

    agent_boot: AgentBoot
    slot_ids: SlotIds


class Digests(Message, frozen=True):
    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DIGESTS)]
    """Digest of each chosen piece, in order: 8 bytes, little-endian."""


@request(
    "digest",
    Socket.PREFILL_PEER,
    refusals=f"{OF_OFFER} offer_open offer_parked geometry transfer_failed",
)
class Digest(Request[Digests], frozen=True):
    """Get digests of a tile as one rank holds it now; see [Digests](#digests)."""

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    """Id of the offer; also selects the pieces."""
    rank: HolderRank
    tile: Tile
    """Tile to digest, of at most 131,072 pieces."""
    table: TileTable
    one_in: OneIn
    secret: OfferSecret
    """Secret from the offer's ticket; only the engine's home can check it."""
    rank_secret: RankSecret


@request("check", Socket.PREFILL_PEER, at_once=True, refusals="stale forbidden engine_lost")
class CheckMemory(Request[Empty], frozen=True):
    """Check that the ranks of an engine at this agent are still those of the handshake. Send it to
    agents other than the engine's home: before the read, with each renewal of the lease, and after
    the last byte. Send it to any agent while a read drains, and after mapped memory has gone. As in
    a handshake, the agent also detects memory that the engine has truncated.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    rank_secret: RankSecret
    offer_id: Text = ""
    """Offer that is or was read."""
    progress_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Seconds from now for which the agent drives reads of the offer; 0 if nothing more is read."""
    nixl_agent: Text = ""
    """As in ``commit``."""


@request(
    "await_work",
    Socket.PREFILL_PEER,
    refusals=f"stale forbidden engine_lost busy {ORDERED}",
)
class AwaitWork(Request[Empty], frozen=True):
    """Wait until the ranks of an engine at this agent have reached the number of a grant. If it is
    not 0, send it to agents other than the engine's home, and read these tokens after the reply.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    rank_secret: RankSecret
    after: SequenceNumber
    """As in the reply to ``acquire`` and ``renew``."""


class PartFetched(Message, frozen=True):
    """Reply to `FetchPart`: nothing of the part is in flight at this agent any longer. Without a
    ``code``, all of it was read and committed.
    """

    num_bytes: Size
    """Bytes read into the remote ranks."""
    path: Text
    """As in the reply to ``fetch``."""
    code: Text = ""
    """Error code of a failed part, as in the reply to ``fetch``."""
    message: Text = ""
    """Explanation of that error."""


@request(
    "fetch_part",
    Socket.DECODE_PEER,
    refusals="engine_unknown engine_not_ready geometry unsupported_version draining busy "
    f"engine_lost {ORDERED}",
)
class FetchPart(Request[PartFetched], frozen=True):
    """Fetch into remote ranks of a decode engine, at the request of its home; see [Engines with
    several agents](#engines-with-several-agents). A repeat with the same ``token`` waits for the
    same reply. After a refusal, send ``cancel_part``: the part may have started.
    """

    token: Secret
    """The right to this part, new for each."""
    fetch_id: Id
    """Id of the fetch at the home, for histories and traces."""
    engine_id: EngineId
    rank_secret: Secret
    """The ``rank_secret`` of this agent in ``remote_ranks`` of the control session."""
    ranks: Ranks
    """Remote ranks to read into."""
    ticket: TicketMap
    memory_ids: Annotated[tuple[Id, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """The ``memory_id`` of the prefill engine's home, then of each of ``remote_ranks``. An agent
    that knows other ids shakes hands again."""
    num_tokens: Tokens
    """As in ``fetch``."""
    tables: Tables
    """As in ``fetch``."""
    timeout_s: Seconds
    """Seconds until the part fails on its own."""
    first_token: Tokens = 0
    """As in ``fetch``."""
    zero_tail: bool = False
    """As in ``fetch``."""
    priority: Priority = 0
    traceparent: Text = ""
    """As in ``fetch``."""
    pool_id: ReadEngine = ""
    """Pool that has the blocks of a parked offer; empty for the ticket's engine."""
    pool_instance: Text = ""
    """Instance of that pool."""
    origin: Secret | None = None
    """Name of all parts that this process of the home requests from this agent in one fetch."""
    after: SequenceNumber = 0
    """As in ``fetch``: the agent waits for the ranks of the engine that it has."""


@request("cancel_part", Socket.DECODE_PEER, refusals="busy")
class CancelPart(Request[Empty], frozen=True):
    """Cancel a part. The reply comes when nothing of it is in flight any longer. From then on, the
    reply to a ``fetch_part`` with this ``token`` has the code ``cancelled``, or that of the part. A
    second request makes the agent refuse the first one with ``busy``.
    """

    token: Secret
    """Token of the ``fetch_part``, or its ``origin``. A new process of the home uses the origin to
    end the parts of its predecessor."""
