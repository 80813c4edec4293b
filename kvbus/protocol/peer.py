"""Messages on the peer socket of an agent: from other agents, routers and tools.

Types and ranges are in the annotations; the agent checks the meaning. A request with an
``agent_boot`` is for that process of the agent: another one answers ``stale``.
"""

from typing import Annotated, Any, Literal

import msgspec

from kvbus.geometry import BlockTable, Box, EngineSpec, RankSpec
from kvbus.geometry.spec import Index
from kvbus.protocol.attach import MemorySocket
from kvbus.protocol.engine import AgentRanks, Ranks, Tables
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
    MemoryAccess,
    MemoryId,
    Message,
    MinProtocol,
    OfferId,
    Priority,
    Protocol,
    Request,
    Role,
    Seconds,
    Secret,
    Size,
    Socket,
    Text,
    Tokens,
    request,
)

OF_OFFER = f"stale forbidden offer_unknown {OFFER_ENDED}"
Address = Annotated[int, msgspec.Meta(ge=0, le=2**62 - 1)]  # plus an offset still 64 bits, signed
OfferSecret = Secret
"""The secret of the offer's ticket."""
LeaseToken = Secret
"""The right to the lease, from the reply to ``claim``."""
ReaderId = Id
"""Who asks. Unique for each fetch of each agent, and the same in all that is asked for it."""
ReaderAgent = Text
"""Id of the agent that asks. A lease of the same agent, with the same key where there are keys, and
another ``reader_boot`` ends."""
ReaderBoot = Text
"""Boot id of the agent that asks."""
TransferId = Secret
"""The name of the offer. Who knows it is given the ticket."""
HolderRank = Index
"""The rank that holds the box."""
BoxTable = BlockTable
"""Exactly the blocks of the box's positions, as the offer names them, in blocks of the *prefill*
engine."""
TicketMap = dict[str, Any]
"""The [ticket](#ticket)."""
SlotId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""Names this use of a slot, and no other."""
SlotIds = Annotated[tuple[SlotId, ...], msgspec.Meta(max_length=1024)]
"""The slots."""
MAX_DIGESTS = 1 << 17
"""Of one request; they take 1 MiB."""
OneIn = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
"""1 for all pieces, more for about one in so many."""


class EngineMemory(msgspec.Struct, frozen=True):
    """The ranks of one engine that are attached to one agent."""

    engine: EngineSpec
    """The engine."""
    ranks: Annotated[tuple[RankSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """Its ranks at this agent, in order of their number."""
    addresses: tuple[dict[str, Address], ...] = ()
    """One map for each of ``ranks``, in the same order: the address of each segment, by
    ``segment_id``, in the agent's process. A rank whose map is empty is *unregistered*: read it in
    boxes, with ``pack``. No maps at all on the side that only describes itself."""


class HandshakeDone(Message, frozen=True):
    """Reply to `Handshake`: the prefill engine's memory, and what NIXL needs to read it."""

    protocol: Protocol
    agent_id: AgentId
    memory: EngineMemory
    """The prefill engine, with the ranks that are attached here and their addresses."""
    memory_id: Id
    """Stands for the processes that hold these ranks. It changes when one of them comes back;
    ``pack`` and ``check`` name it."""
    nixl_agent: Id
    """Name of the NIXL agent that owns the memory."""
    nixl_metadata: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    """What NIXL's ``getLocalPartialMD`` gave, one blob for each kind of memory; load each with
    ``loadRemoteMD``. Opaque. Empty for a ``machine`` that maps the memory."""
    events_endpoint: Endpoint
    """Where the prefill agent publishes events."""
    max_lease_s: Seconds
    """The longest lease that one claim or renewal gets."""
    access: Secret
    """What is shown in ``pack``, ``check`` and ``lend`` at this agent. It is a secret."""
    slot_bytes: Size = 0
    """Bytes of a staging slot, and so of the largest box of a ``pack``; 0 when the agent packs
    nothing."""
    others: tuple[AgentRanks, ...] = ()
    """The other agents that have ranks of the engine, each to be shaken hands with. Empty when all
    are here, and in the reply of an agent that is not the engine's home."""
    memory_socket: MemorySocket | None = None
    """Where an agent of the same machine and user gets these ranks' memory; see
    [Memory socket](#memory-socket). Nil from an agent that has none."""
    digests: bool = False
    """Whether the agent answers ``digest``."""


@request(
    "handshake",
    Socket.PREFILL_PEER,
    refusals=f"unsupported_version {OF_OFFER} engine_unknown engine_not_ready incompatible "
    "geometry transfer_failed",
)
class Handshake(Request[HandshakeDone], frozen=True):
    """A decode agent introduces one of its engines to one prefill engine. It is repeated whenever
    either engine or either agent is a new process, and made with each agent that has ranks of the
    prefill engine. Without ``offer_id`` and ``secret`` it is *ahead* of the first ticket: a prefill
    agent answers that to keys that are trusted as ``decode``, or to anybody where its
    ``shake_hands_ahead`` says so; others are refused with ``forbidden``.
    """

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    agent_id: Id
    """Name of the decode agent."""
    engine_id: Id
    """The prefill engine that is meant, from the ticket; ahead of one, from the status."""
    reader: EngineMemory
    """The decode engine, with the ranks that the decode agent has; its ``addresses`` stay empty."""
    engine_instance: Text = ""
    """Its instance, from the same. Empty with ``ranks``."""
    offer_id: Text = ""
    """The offer, from the ticket. Empty with ``ranks``, and ahead of a ticket."""
    secret: Secret | None = None
    """The secret, from the ticket. Nil with ``ranks``, and ahead of a ticket."""
    ranks: Annotated[tuple[Size, ...], msgspec.Meta(max_length=1024)] = ()
    """To an agent that is not the engine's home: the ranks that the home says it has."""
    access: Secret | None = None
    """With ``ranks``: what the home says is shown there."""
    machine: Text = ""
    """Boot id of the decode agent's kernel, if it can map the memory of an engine: then a prefill
    agent of the same machine that lends it leaves out ``nixl_metadata``, and need not open NIXL.
    Empty otherwise, and when it has asked so, could not map, and asks again."""


class Granted(Message, frozen=True):
    """Reply to `Claim` and `Renew`: the lease, and what of the offer is readable."""

    epoch: Epoch
    """Names this lease. It grows with each claim of an offer."""
    lease_s: Seconds
    """The lease ends so many seconds after the agent *received* the request. A reader counts from
    when it *sent* the request, so it never believes longer than the agent."""
    num_tokens: Tokens
    """Tokens that may be read now."""
    sealed: bool
    """Whether that is all."""
    tables: Tables
    """By group, the blocks behind those that the reader already knows; each names its
    ``first_block``."""
    token: Secret
    """The right to the lease: 128 random bits. Everything that is asked under the lease shows it.
    It is not to be published or logged."""


@request("claim", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} busy")
class Claim(Request[Granted], frozen=True):
    """Asks for the lease of an offer. As many readers have one at a time as the offer still has
    (``readers`` of ``offer``, 1 as a rule). The same ``reader_id`` may claim again: it gets a new
    epoch and the old one is dead. So does another process of the agent whose earlier process had
    the lease: a decode agent that died need not be waited for when it is back.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    lease_s: Seconds
    """Seconds that are wanted. The agent may grant fewer."""
    secret: OfferSecret
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    part: bool = False
    """Whether the reader is one of several agents of an engine, and not its home: then the lease
    does not count among the ``readers`` of the offer. At most 1,024 are live or done."""


@request("renew", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Renew(Request[Granted], frozen=True):
    """Lengthens a live lease, and asks what was added to the offer."""

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    lease_s: Seconds
    """Seconds that are wanted from now on. A renewal never shortens a lease."""
    token: LeaseToken
    known_blocks: dict[str, Size] = msgspec.field(default_factory=dict)
    """How many blocks of each group the reader knows, from the start of the offer's table on."""


@request(
    "take",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals=f"{OF_OFFER} offer_open lease_expired busy geometry",
)
class Take(Request[Empty], frozen=True):
    """Asks, after the last byte has landed, whether what was read is good. Only ``ok`` makes the
    bytes valid: the offer is sealed and was live all along. It completes the offer when this was
    the last of its readers, and ends the lease of this reader. A reader without a live lease says
    in ``tables`` what it has read, by the ticket's ``blocks``; they must be those of the offer.
    Sent again with the same ``token`` it is ok again.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    secret: OfferSecret
    token: Secret
    """The reader's own, random and new for each fetch: a repeated take shows it."""
    tables: Tables | None = None
    """The block tables that were read, as the ticket's ``blocks`` has them. Others than the offer's
    are refused as ``geometry``. Left out by a reader with a live lease, whose tables are the
    offer's."""
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    part: bool = False
    """As of a ``claim``: the take ends the lease, and not the offer."""


@request("release", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Release(Request[Empty], frozen=True):
    """Gives a lease back without using what was read. Nothing of the reader is in flight any more.
    The offer waits for another reader.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    token: LeaseToken
    code: Id
    """Why it was not used. Text, since a newer agent may have new codes."""


@request(
    "withdraw",
    Socket.PREFILL_PEER,
    askers=(Role.DECODE, Role.ROUTER),
    at_once=True,
    refusals="stale forbidden offer_unknown",
)
class PeerWithdraw(Request[Empty], frozen=True):
    """Ends an offer whose request was aborted. For routers; the engine has ``withdraw`` on its own
    socket.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    secret: OfferSecret


class Met(Message, frozen=True):
    ticket: TicketMap


@request(
    "meet",
    Socket.PREFILL_PEER,
    refusals="busy engine_lost engine_not_ready cancelled offer_withdrawn offer_expired "
    "offer_completed draining",
)
class Meet(Request[Met], frozen=True):
    """Asks for the ticket of an offer by the name that a router gave it (``transfer_id`` of
    ``offer``), also before the offer is made; see [Rendezvous](#rendezvous). Answered as soon as
    there is one. ``busy`` when there is none after ``wait_s``: ask again, until the fetch's
    deadline. ``engine_lost`` when the last engine of the agent goes meanwhile, ``engine_not_ready``
    when none has been ready for 2 s: nobody can make the offer.
    """

    transfer_id: TransferId
    wait_s: Seconds
    """Seconds that the agent may take to answer; it answers sooner if it wants."""


@request("forgo", Socket.PREFILL_PEER, refusals="busy offer_unknown draining")
class Forgo(Request[Empty], frozen=True):
    """Says that nobody will read the offer of a name. It is withdrawn, or refused to its engine
    (``cancelled``) when that makes it later.
    """

    transfer_id: TransferId


class Packed(Message, frozen=True):
    """Reply to `Pack`. What is read after the end of the slot's lease is not valid."""

    slot_id: SlotId
    address: Address
    """Where the box starts, in the agent's process; the handshake's ``nixl_metadata`` covers it."""
    num_bytes: Size
    """Bytes of the box in its order, parts of blocks outside the box included."""
    slot_lease_s: Seconds
    """The slot is the reader's for so many seconds after the agent *received* the request, and
    while the lease lives. A reader counts from when it *sent* the request."""
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    """NIXL's kind of the slot's memory: that of the host, or of a GPU."""
    device: Index = 0
    """NIXL's device number of the slot, in the prefill agent's process."""


@request(
    "pack",
    Socket.PREFILL_PEER,
    refusals="stale forbidden offer_unknown offer_open lease_expired offer_withdrawn offer_expired "
    "engine_lost draining geometry timeout config",
)
class Pack(Request[Packed], frozen=True):
    """Asks for a box of what one rank holds, gathered into a staging slot; see
    [Packed reads](#packed-reads). The reply comes when the box is gathered, which may wait for a
    slot. The wait counts against ``slot_lease_s``: refused with ``timeout`` when that is over
    first.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    epoch: Epoch
    """The lease. An agent that is not the engine's home cannot check it; the ``take`` does."""
    rank: HolderRank
    box: Box
    """What is wanted. Not more than ``slot_bytes``."""
    table: BoxTable
    slot_lease_s: Seconds
    """Seconds that are wanted for waiting, gathering and reading together. The agent may grant
    fewer."""
    token: Secret
    """The token of the lease. An agent that is not the engine's home cannot check it."""
    access: MemoryAccess
    done: SlotIds = ()
    """Slots of this agent that the reader has read. They are given back, also when the rest is
    refused."""
    priority: Priority = 0


@request("unpack", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class Unpack(Request[Empty], frozen=True):
    """Gives staging slots back that were read, or are not wanted. Slots that are not known, or that
    another session asked for, are left as they are.
    """

    agent_boot: AgentBoot
    slot_ids: SlotIds


class Digests(Message, frozen=True):
    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DIGESTS)]
    """For each chosen piece, in order, its digest: 8 bytes, little-endian."""


@request("digest", Socket.PREFILL_PEER, refusals=f"{OF_OFFER} offer_open geometry")
class Digest(Request[Digests], frozen=True):
    """Asks for digests of a box of what one rank holds, as it is in memory now; see
    [Digests](#digests). The reply comes when they are made. For an agent whose handshake says
    ``digests``.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    """The offer. It says which pieces are chosen as well."""
    rank: HolderRank
    box: Box
    """What is to be digested: at most 131,072 pieces."""
    table: BoxTable
    one_in: OneIn
    secret: OfferSecret
    """The secret, from the ticket. An agent that is not the engine's home cannot check it."""
    access: MemoryAccess


@request("check", Socket.PREFILL_PEER, at_once=True, refusals="stale forbidden engine_lost")
class CheckMemory(Request[Empty], frozen=True):
    """Asks whether the ranks of an engine that are at this agent are still those of the handshake.

    A reader asks each agent without the lease, after the last byte landed and before the take. Such
    an agent does not know when it is read: so a reader asks before it reads, too, and whenever it
    renews the lease.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    access: MemoryAccess
    offer_id: Text = ""
    """The offer that is read, or was."""
    progress_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Seconds for which the agent serves reads of the offer, from now, and no longer than it grants
    leases; 0 when nothing more is read."""


class PartFetched(Message, frozen=True):
    """Reply to `FetchPart`: the part was read and taken; its blocks are the home's to hand on."""

    num_bytes: Size
    """Bytes that were read into the remote ranks."""
    path: Text
    """How, as in ``fetched``."""


@request(
    "fetch_part",
    Socket.DECODE_PEER,
    refusals=f"{OF_OFFER} offer_open engine_unknown engine_not_ready geometry incompatible "
    "unsupported_version peer_unreachable peer_lost lease_expired transfer_failed digest_mismatch "
    "timeout busy cancelled",
)
class FetchPart(Request[PartFetched], frozen=True):
    """The home of a decode engine asks an agent with remote ranks of it to fetch into the ranks
    that this agent has; see [Engines with several agents](#engines-with-several-agents). It is a
    fetch of that agent's own: it claims a lease with ``part``, reads and takes. Whether it worked
    or not, the reply comes when nothing of it is in flight any more; it may be any error that a
    fetch can end with. Asked again with the same ``token``, as by a new connection, it goes on, or
    its answer is said again.
    """

    token: Secret
    """The right to this part, 128 random bits, new for each: ``cancel_part`` shows it. It is not to
    be published or logged."""
    fetch_id: Id
    """The fetch at the home, for stories and traces."""
    engine_id: EngineId
    access: Secret
    """What the engine's control session said of this agent in ``others``."""
    ranks: Ranks
    """The remote ranks to read into."""
    ticket: TicketMap
    memory_ids: Annotated[tuple[Id, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """What of the prefill engine the asker's handshakes were about: ``memory_id`` of its home, then
    of each agent in ``others``. An agent that knows others shakes hands again."""
    num_tokens: Tokens
    """As in ``fetch``."""
    tables: Tables
    """As in ``fetch``."""
    timeout_s: Seconds
    """Seconds until the part fails by itself."""
    first_token: Tokens = 0
    """As in ``fetch``."""
    zero_tail: bool = False
    """As in ``fetch``."""
    priority: Priority = 0
    traceparent: Text = ""
    """As in ``fetch``."""


@request("cancel_part", Socket.DECODE_PEER, refusals="busy")
class CancelPart(Request[Empty], frozen=True):
    """Ends a part, and is answered when nothing of it is in flight any more, as the ``fetch_part``
    is; at once when nothing is known of it. From then on a ``fetch_part`` with this ``token`` is
    refused (``cancelled``), whenever and by whatever connection it comes. Asked again before the
    answer, the earlier question is refused as ``busy``.
    """

    token: Secret
    """That of the ``fetch_part``."""
