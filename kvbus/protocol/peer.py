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
"""The reader: one for each fetch of each agent."""
ReaderAgent = Text
"""Id of the agent that asks. It ends a lease of the same agent, and key, with another
``reader_boot``."""
ReaderBoot = Text
"""Boot id of the agent that asks."""
TransferId = Secret
"""The name of the offer. Who knows it is given the ticket."""
HolderRank = Index
"""The rank that holds the box."""
BoxTable = BlockTable
"""Exactly the blocks of the box's positions, as the offer names them."""
TicketMap = dict[str, Any]
"""The [ticket](#ticket)."""
SlotId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""Names this use of a slot, and no other."""
SlotIds = Annotated[tuple[SlotId, ...], msgspec.Meta(max_length=1024)]
"""The slots."""
MAX_TAKEN = 64
"""Of one message: the loop of its agent is held up for some 3 ms by so many ends of offers."""
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
    """For each of ``ranks`` the address of each segment in the agent's data process, by
    ``segment_id``. A rank whose map is empty is *unregistered*."""


class HandshakeDone(Message, frozen=True):
    """Reply to `Handshake`: the prefill engine's memory, and what NIXL needs to read it."""

    protocol: Protocol
    agent_id: AgentId
    memory: EngineMemory
    """The prefill engine, with the ranks that are attached here and their addresses."""
    memory_id: Id
    """Stands for the processes that hold these ranks."""
    nixl_agent: Id
    """Name of the NIXL agent that owns the memory."""
    nixl_metadata: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    """What NIXL's ``getLocalPartialMD`` gave, a blob for each kind of memory. Empty for a
    ``machine`` that maps the memory."""
    events_endpoint: Endpoint
    """Where the prefill agent publishes events."""
    max_lease_s: Seconds
    """The longest lease that one claim or renewal gets."""
    access: Secret
    """What is shown in ``pack``, ``digest``, ``check`` and ``lend`` at this agent."""
    slot_bytes: Size = 0
    """Bytes of a staging slot, and so of the largest box; 0 when the agent packs nothing."""
    others: tuple[AgentRanks, ...] = ()
    """Of the engine's home: the other agents that have ranks of it."""
    memory_socket: MemorySocket = MemorySocket()
    """Where an agent of the same machine and user gets this memory."""
    grant: Text = ""
    """With keys: what ``lend`` shows there. It ties that connection to the key of this one."""


@request(
    "handshake",
    Socket.PREFILL_PEER,
    refusals=f"unsupported_version {OF_OFFER} engine_unknown engine_not_ready incompatible "
    "geometry transfer_failed busy",
)
class Handshake(Request[HandshakeDone], frozen=True):
    """A decode agent introduces one of its engines to one prefill engine, at each agent that has
    ranks of that, and again whenever one of these, or its data process, is a new process. Without
    ``offer_id`` and ``secret`` it is *ahead* of the first ticket, for those that
    ``shake_hands_ahead`` allows.
    """

    min_protocol: MinProtocol
    max_protocol: MaxProtocol
    agent_id: Id
    """Name of the decode agent."""
    engine_id: Id
    """The prefill engine, from the ticket, or from the status."""
    reader: EngineSpec
    """The decode engine."""
    engine_instance: Text = ""
    """Its instance, from the same. Empty with ``ranks``."""
    offer_id: Text = ""
    """The offer, from the ticket. Empty with ``ranks``, and ahead of a ticket."""
    secret: Secret | None = None
    """The secret, from the ticket. Nil with ``ranks``, and ahead of a ticket."""
    ranks: Annotated[tuple[Size, ...], msgspec.Meta(max_length=1024)] = ()
    """To an agent that is not the home: what ``others`` of the home says it has."""
    access: Secret | None = None
    """With ``ranks``: what the home says is shown there."""
    machine: Text = ""
    """Boot id of the decode agent's kernel; empty when it cannot map memory."""


class Granted(Message, frozen=True):
    """Reply to `Claim` and `Renew`: the lease, and what of the offer is readable."""

    epoch: Epoch
    """The lease; it grows with each claim of an offer."""
    lease_s: Seconds
    """The lease ends so many seconds after the agent *received* the request; a reader counts from
    when it *sent* it."""
    num_tokens: Tokens
    """Tokens that may be read now."""
    sealed: bool
    """Whether that is all."""
    tables: Tables
    """By group, the blocks behind those that the reader knows."""
    token: Secret
    """The right to the lease."""


@request("claim", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} busy")
class Claim(Request[Granted], frozen=True):
    """Asks for the lease of an offer, of which there are as many at a time as ``readers`` are left.
    The same ``reader_id``, or a new process of the agent that had the lease, gets a new epoch, and
    the old one is dead.
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
    """Whether the reader is one of several agents of an engine, and not its home: it does not count
    among the ``readers``. At most 1,024 of an offer."""


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
    """How many blocks of each group the reader knows."""
    nixl_agent: Text = ""
    """The handshake's ``nixl_agent``. Another one than the agent has now is ``stale``: a READ from
    it may never end.
    """


@request(
    "take",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals=f"{OF_OFFER} offer_open lease_expired busy geometry",
)
class Take(Request[Empty], frozen=True):
    """Asks, after the last byte has landed, whether what was read is good. Only ``ok`` makes the
    bytes valid. It ends the lease of this reader, and completes the offer when this was the last
    one. Sent again with the same ``token`` it is ok again.
    """

    agent_boot: AgentBoot
    offer_id: OfferId
    reader_id: ReaderId
    secret: OfferSecret
    token: Secret
    """The reader's own, random and new for each fetch: a repeated take shows it."""
    tables: Tables | None = None
    """The block tables that were read, as the ticket's ``blocks`` has them; others than the offer's
    are ``geometry``. A reader with a live lease leaves them out, and the two fields that follow."""
    num_tokens: Tokens = 0
    """The ticket's tokens; another number than the offer's is ``geometry``."""
    engine_id: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The ticket's engine; another one than the offer's is ``geometry``."""
    reader_agent: ReaderAgent = ""
    reader_boot: ReaderBoot = ""
    part: bool = False
    """As of a ``claim``: the take ends the lease, and not the offer."""
    nixl_agent: Text = ""
    """The handshake's ``nixl_agent`` that was read from; empty when nothing was read with NIXL.
    Another one than the agent has now is ``stale``.
    """


@request("taken", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class WordsTaken(Request[Empty], frozen=True):
    """Names offers that were taken by their words; any others are passed over."""

    agent_boot: AgentBoot
    tokens: Annotated[dict[OfferId, Secret], msgspec.Meta(max_length=MAX_TAKEN)]
    """By offer, the token in its word."""


class CommitAnswer(Message, frozen=True):
    committed: bool
    """Whether a ``take`` with this token, or a swap of the offer's word, completed the read."""
    num_tokens: Tokens = 0
    """Tokens of the offer, if so."""


@request(
    "committed",
    Socket.PREFILL_PEER,
    at_once=True,
    refusals="forbidden engine_not_ready",
)
class CommitQuery(Request[CommitAnswer], frozen=True):
    """Asks whether an earlier process of this decode agent took the offer, before a fetch is
    repeated. Any process of the prefill agent answers, so it names no ``agent_boot``.

    When the answer is no, only ``reader_boot`` may take the offer with this token: a ``take`` of
    another process that arrives later is ``stale``. An offer that the agent does not know is not
    committed; ``engine_not_ready`` while the agent waits for the engine's offers.
    """

    secret: OfferSecret
    """The secret of the ticket; of a rendezvous, its ``transfer_id``."""
    token: Secret
    """That of the ``take``."""
    reader_boot: Id
    """Boot id of the decode agent that asks."""
    offer_id: Text = ""
    """The offer, from the ticket; empty for a rendezvous."""
    engine_id: Text = ""
    """The prefill engine, from the ticket; empty for a rendezvous."""
    engine_instance: Text = ""
    """Its instance, from the ticket; empty for a rendezvous."""


@request("release", Socket.PREFILL_PEER, at_once=True, refusals=f"{OF_OFFER} lease_expired")
class Release(Request[Empty], frozen=True):
    """Gives a lease back, with nothing in flight and nothing used."""

    agent_boot: AgentBoot
    offer_id: OfferId
    epoch: Epoch
    token: LeaseToken
    code: Id
    """Why it was not used: an error code."""


@request(
    "withdraw",
    Socket.PREFILL_PEER,
    askers=(Role.DECODE, Role.ROUTER),
    at_once=True,
    refusals="stale forbidden offer_unknown engine_not_ready",
)
class PeerWithdraw(Request[Empty], frozen=True):
    """Ends an offer whose request was aborted; for routers."""

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
    """Asks for the ticket of a [rendezvous](#rendezvous). Answered as soon as there is one;
    ``busy`` when there is none after ``wait_s``; ``engine_not_ready`` when no engine has been ready
    for 2 s.
    """

    transfer_id: TransferId
    wait_s: Seconds
    """Seconds that the agent may take to answer."""


@request("forgo", Socket.PREFILL_PEER, refusals="busy offer_unknown draining")
class Forgo(Request[Empty], frozen=True):
    """Nobody will read the offer of a name. It is withdrawn, or refused to its engine
    (``cancelled``) when that makes it later.
    """

    transfer_id: TransferId


@request("cancel_request", Socket.PREFILL_PEER, at_once=True)
class CancelRequest(Request[Empty], frozen=True):
    """Tells the agent that you wait no longer for the reply to an earlier request of this session.
    The agent frees what the request holds, and refuses it with ``cancelled``. Without this, a
    ``meet`` that nobody waits for holds its place until ``wait_s`` is over.
    """

    request_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """The ``id`` of that request. One that was answered, or never came, changes nothing."""


class Packed(Message, frozen=True):
    """Reply to `Pack`. What is read after the end of the slot's lease is not valid."""

    slot_id: SlotId
    address: Address
    """Where the box starts in the agent's data process, within ``nixl_metadata``."""
    num_bytes: Size
    """Bytes of the box in its order, parts of blocks outside the box included."""
    slot_lease_s: Seconds
    """The slot is the reader's for so long, while the lease lives; counted as ``lease_s``."""
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    """NIXL's kind of the slot's memory: that of the host, or of a GPU."""
    device: Index = 0
    """NIXL's device number of the slot, in the prefill agent's data process."""


@request(
    "pack",
    Socket.PREFILL_PEER,
    refusals="stale forbidden offer_unknown offer_open lease_expired offer_withdrawn offer_expired "
    "engine_lost draining geometry timeout config transfer_failed",
)
class Pack(Request[Packed], frozen=True):
    """Asks for a box of what one rank holds, gathered into a staging slot; see [Packed
    reads](#packed-reads). Answered when it is gathered, which may wait for a slot.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    epoch: Epoch
    """The lease. Only the engine's home can check it; else the ``take`` does."""
    rank: HolderRank
    box: Box
    """What is wanted. Not more than ``slot_bytes``."""
    table: BoxTable
    slot_lease_s: Seconds
    """Seconds that are wanted to wait, gather and read; the agent may grant fewer."""
    token: Secret
    """That of the lease, which only the engine's home can check."""
    access: MemoryAccess
    done: SlotIds = ()
    """Slots that were read: given back, also when the rest is refused."""
    priority: Priority = 0


@request("unpack", Socket.PREFILL_PEER, at_once=True, refusals="stale")
class Unpack(Request[Empty], frozen=True):
    """Gives back staging slots that were read, or are not wanted."""

    agent_boot: AgentBoot
    slot_ids: SlotIds


class Digests(Message, frozen=True):
    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DIGESTS)]
    """For each chosen piece, in order, its digest: 8 bytes, little-endian."""


@request("digest", Socket.PREFILL_PEER, refusals=f"{OF_OFFER} offer_open geometry transfer_failed")
class Digest(Request[Digests], frozen=True):
    """Asks for digests of a box of what one rank holds now; see [Digests](#digests)."""

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    offer_id: OfferId
    """The offer; it says which pieces are chosen, too."""
    rank: HolderRank
    box: Box
    """What is to be digested: at most 131,072 pieces."""
    table: BoxTable
    one_in: OneIn
    secret: OfferSecret
    """The ticket's secret, which only the engine's home can check."""
    access: MemoryAccess


@request("check", Socket.PREFILL_PEER, at_once=True, refusals="stale forbidden engine_lost")
class CheckMemory(Request[Empty], frozen=True):
    """Asks whether the ranks of an engine that are at this agent are still those of the handshake.
    For agents that are not the engine's home: before the read, with each renewal of the lease, and
    after the last byte. For any agent: while a read drains, and after mapped memory has gone. The
    agent looks then whether the engine has truncated its memory, as at a handshake.
    """

    agent_boot: AgentBoot
    engine_id: EngineId
    memory_id: MemoryId
    access: MemoryAccess
    offer_id: Text = ""
    """The offer that is read, or was."""
    progress_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """Seconds from now for which the agent drives reads of the offer; 0 when nothing more is
    read."""
    nixl_agent: Text = ""
    """As of a ``take``."""


class PartFetched(Message, frozen=True):
    """Reply to `FetchPart`: nothing of the part is in flight at this agent any more. Without a
    ``code`` all of it was read and taken.
    """

    num_bytes: Size
    """Bytes that were read into the remote ranks."""
    path: Text
    """How, as in the reply to ``fetch``."""
    code: Text = ""
    """Of the error that the part failed with, as in the reply to ``fetch``."""
    message: Text = ""
    """Of that error."""


@request(
    "fetch_part",
    Socket.DECODE_PEER,
    refusals="engine_unknown engine_not_ready geometry unsupported_version draining busy",
)
class FetchPart(Request[PartFetched], frozen=True):
    """The home of a decode engine asks an agent with remote ranks of it to fetch into these; see
    [Engines with several agents](#engines-with-several-agents). A repeat with the same ``token``
    waits for the same reply. A refusal does not prove that nothing was begun: send ``cancel_part``.
    """

    token: Secret
    """The right to this part, new for each."""
    fetch_id: Id
    """The fetch at the home, for stories and traces."""
    engine_id: EngineId
    access: Secret
    """What the control session said of this agent in ``others``."""
    ranks: Ranks
    """The remote ranks to read into."""
    ticket: TicketMap
    memory_ids: Annotated[tuple[Id, ...], msgspec.Meta(min_length=1, max_length=1024)]
    """``memory_id`` of the prefill engine's home, then of each of ``others``. An agent that knows
    others shakes hands again."""
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
    origin: Secret | None = None
    """Names all parts that this process of the home asks this agent for in one fetch."""


@request("cancel_part", Socket.DECODE_PEER, refusals="busy")
class CancelPart(Request[Empty], frozen=True):
    """Ends a part; answered when nothing of it is in flight any more. From then on the reply to a
    ``fetch_part`` with this ``token`` has the code ``cancelled``, or that of the part. Asked again,
    the earlier question is ``busy``.
    """

    token: Secret
    """That of the ``fetch_part``, or its ``origin``: the next process of the home ends what the
    one before has asked for."""
