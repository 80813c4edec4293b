"""Messages on the peer socket of an agent: from other agents, routers and tools.

Types and ranges are in the annotations; the agent checks the meaning. A request with an
``agent_boot`` is for that process of the agent: another one answers ``stale``.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvbus.geometry import BlockTable, Box, EngineSpec, RankSpec, SlotOrder
from kvbus.geometry.spec import Index
from kvbus.protocol.attach import MemorySocket
from kvbus.protocol.engine import AgentRanks, Ranks, Tables
from kvbus.protocol.message import (
    Address,
    Empty,
    Endpoint,
    Epoch,
    Id,
    Message,
    Priority,
    Request,
    Seconds,
    Secret,
    Size,
    Text,
    Tokens,
)
from kvbus.protocol.status import Cost, Status
from kvbus.protocol.trace import Trace


class EngineMemory(msgspec.Struct, frozen=True):
    """The ranks of one engine that an agent has, and where each segment lies in its addresses.

    ``addresses[r][segment_id]`` belongs to ``ranks[r]``; empty on the side that only describes. A
    rank without addresses is unregistered: it can be read in boxes, with `Pack`, and no other way.
    """

    engine: EngineSpec
    ranks: Annotated[tuple[RankSpec, ...], msgspec.Meta(min_length=1, max_length=1024)]
    addresses: tuple[dict[str, Address], ...] = ()


class HandshakeDone(Message, frozen=True):
    """Reply to `Handshake`: the prefill engine's memory, and what NIXL needs to read it.

    ``memory_id`` stands for the processes of these ranks. ``others`` are the agents that have the
    rest, each to be shaken hands with. ``slot_bytes`` is the largest box of a `Pack`.
    ``nixl_metadata`` has one blob for each kind of memory, and none where the reader is to map the
    memory. ``access`` is shown in what is asked about these ranks later. ``memory_socket`` is for
    an agent of the same machine. ``digests`` says that `Digest` is answered.
    """

    protocol: int
    agent_id: Id
    memory: EngineMemory
    memory_id: Id
    nixl_agent: Id
    nixl_metadata: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=8)]
    events_endpoint: Endpoint
    max_lease_s: Seconds
    access: Secret
    slot_bytes: Size = 0
    others: tuple[AgentRanks, ...] = ()
    memory_socket: MemorySocket | None = None
    digests: bool = False


class Handshake(Request[HandshakeDone], frozen=True):
    """A decode agent introduces one of its engines to one prefill engine.

    It names the ``engine_instance`` and ``offer_id`` of a ticket of that engine, and shows its
    ``secret``; ahead of the first ticket neither of these two, where the prefill agent allows that.
    An agent that has only some ranks of the prefill engine, and no control session, is asked with
    ``ranks`` and ``access`` instead, as the engine's home named them.
    A reader that can map memory names its ``machine``. Where the answer has no ``nixl_metadata``,
    and the memory cannot be mapped, it asks again without.
    Refused with ``incompatible``, the field and both values, when KV of the one cannot be used by
    the other.
    """

    op: ClassVar[str] = "handshake"

    min_protocol: int
    max_protocol: int
    agent_id: Id
    engine_id: Id
    reader: EngineMemory
    engine_instance: Text = ""
    offer_id: Text = ""
    secret: Secret | None = None
    ranks: Annotated[tuple[Size, ...], msgspec.Meta(max_length=1024)] = ()
    access: Secret | None = None
    machine: Text = ""


class Granted(Message, frozen=True):
    """Reply to `Claim` and `Renew`: the lease and what of the offer is readable.

    The lease ends ``lease_s`` after the request was received. ``tables`` hold the blocks from the
    first one that the reader does not know yet. Everything that is asked under the lease shows its
    ``token``.
    """

    epoch: Epoch
    lease_s: Seconds
    num_tokens: Tokens
    sealed: bool
    tables: Tables
    token: Secret


class Claim(Request[Granted], frozen=True):
    """Asks for the lease of an offer, by its ticket's secret; ``busy`` while another has it.

    A lease of an earlier process of ``reader_agent``, with another ``reader_boot``, ends. A
    ``part`` is read beside the reader that it belongs to, which has a lease of its own: it does not
    count among the offer's readers.
    """

    op: ClassVar[str] = "claim"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    reader_id: Id
    lease_s: Seconds
    secret: Secret
    reader_agent: Text = ""
    reader_boot: Text = ""
    part: bool = False


class Renew(Request[Granted], frozen=True):
    """Lengthens a lease; ``known_blocks`` by group, so that the reply only holds what is new."""

    op: ClassVar[str] = "renew"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    epoch: Epoch
    lease_s: Seconds
    token: Secret
    known_blocks: dict[str, Size] = msgspec.field(default_factory=dict)


class Take(Request[Empty], frozen=True):
    """Asks, after the last byte landed, whether what was read is good; ends the offer if so.

    Only an ``ok`` makes the bytes valid: the offer is sealed and was live all along. A reader with
    a live lease leaves ``tables`` out. Otherwise they are those of the ticket, and must be the
    offer's. ``token`` is the reader's own, new for each fetch: with it the answer is ``ok`` again.
    ``busy`` while another has the lease. That of a ``part`` does not end the offer.
    """

    op: ClassVar[str] = "take"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    reader_id: Id
    secret: Secret
    token: Secret
    tables: Tables | None = None
    reader_agent: Text = ""
    reader_boot: Text = ""
    part: bool = False


class Release(Request[Empty], frozen=True):
    """Gives a lease back unread, or the read of it abandoned; nothing of it is in flight.

    ``code`` is text: a newer reader may have codes that this agent does not know.
    """

    op: ClassVar[str] = "release"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    epoch: Epoch
    token: Secret
    code: Id


class PeerWithdraw(Request[Empty], frozen=True):
    """A router ends an offer whose request was aborted, by its ticket's secret."""

    op: ClassVar[str] = "withdraw"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    offer_id: Id
    secret: Secret


class Met(Message, frozen=True):
    """Reply to `Meet`: the ticket of the offer."""

    ticket: dict[str, Any]


class Meet(Request[Met], frozen=True):
    """Asks for the ticket of the offer that has, or will have, the name ``transfer_id``.

    Answered as soon as there is one; ``busy`` when there is none after ``wait_s``: ask again.
    """

    op: ClassVar[str] = "meet"

    transfer_id: Secret
    wait_s: Seconds


class Forgo(Request[Empty], frozen=True):
    """Nobody will read the offer of this name: it is withdrawn, now or when it is made."""

    op: ClassVar[str] = "forgo"

    transfer_id: Secret


SlotId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
SlotIds = Annotated[tuple[SlotId, ...], msgspec.Meta(max_length=1024)]


class Packed(Message, frozen=True):
    """Reply to `Pack`: the box lies at ``address`` of the prefill agent, in the order asked for.

    ``memory`` and ``device`` are what NIXL calls the kind of memory, and the device that it is of.
    The slot is the reader's until ``slot_lease_s`` after the request was received, or until the
    lease of the offer ends; what is read from it later is not valid.
    """

    slot_id: SlotId
    address: Address
    num_bytes: Size
    slot_lease_s: Seconds
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: Index = 0


class Pack(Request[Packed], frozen=True):
    """Asks for a box of what one rank holds, gathered into a staging slot.

    ``table`` has the blocks of the box's positions, as the offer names them; ``done`` are slots
    that the reader has read. Answered when the box is gathered, which may wait for a free slot;
    boxes of a greater ``priority`` wait for less.
    """

    op: ClassVar[str] = "pack"

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    offer_id: Id
    epoch: Epoch
    rank: Index
    box: Box
    order: SlotOrder
    table: BlockTable
    slot_lease_s: Seconds
    token: Secret
    access: Secret
    done: SlotIds = ()
    priority: Priority = 0


class Unpack(Request[Empty], frozen=True):
    """Gives staging slots back that were read, or are not wanted any more."""

    op: ClassVar[str] = "unpack"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    slot_ids: SlotIds


MAX_DIGESTS = 1 << 17
"""Of one request; they take 1 MiB."""
MAX_ONE_IN = 1 << 16

OneIn = Annotated[int, msgspec.Meta(ge=1, le=MAX_ONE_IN)]
OneInOrNone = Annotated[int, msgspec.Meta(ge=0, le=MAX_ONE_IN)]


class Digests(Message, frozen=True):
    """Reply to `Digest`: 8 bytes, little-endian, for each piece that is compared."""

    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DIGESTS)]


class Digest(Request[Digests], frozen=True):
    """Asks for the digests of a box of what one rank holds, as it is in memory now.

    About one in ``one_in`` pieces is digested, which ones follows from the offer's id. ``table``
    has the blocks of the box's positions, as the offer names them. It shows the ticket's secret.
    """

    op: ClassVar[str] = "digest"

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    offer_id: Id
    rank: Index
    box: Box
    table: BlockTable
    one_in: OneIn
    secret: Secret
    access: Secret


class CheckMemory(Request[Empty], frozen=True):
    """Asks whether the ranks of an engine are still those of the handshake; ``stale`` if not.

    A reader asks each agent without the lease, after the last byte landed and before the take.
    Such an agent does not know when it is read: it serves the reads of an offer for ``progress_s``,
    so a reader asks before it reads, too, and whenever it renews the lease. 0 ends that.
    """

    op: ClassVar[str] = "check"
    at_once: ClassVar[bool] = True

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    access: Secret
    offer_id: Text = ""
    progress_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class PartFetched(Message, frozen=True):
    """Reply to `FetchPart`: the part was read and taken; its blocks are the home's to hand on."""

    num_bytes: Size
    path: Text


class FetchPart(Request[PartFetched], frozen=True):
    """The home of a decode engine asks an agent with remote ranks to fetch their part of a fetch.

    It is a fetch of that agent's own, with its own lease, paths and take. Answered when the part
    has ended and nothing of it is in flight any more, within ``timeout_s`` and what its READs take
    to end. Shows the engine's ``access``; ``token`` is new for each part and names it. ``fetch_id``
    is the home's, for people. ``memory_ids`` are those of the prefill agents, as the home knows
    them, the prefill engine's home first: an agent that knows others shakes hands again.
    """

    op: ClassVar[str] = "fetch_part"

    token: Secret
    fetch_id: Id
    engine_id: Id
    access: Secret
    ranks: Ranks
    ticket: dict[str, Any]
    memory_ids: Annotated[tuple[Id, ...], msgspec.Meta(min_length=1, max_length=1024)]
    num_tokens: Tokens
    tables: Tables
    timeout_s: Seconds
    first_token: Tokens = 0
    zero_tail: bool = False
    priority: Priority = 0
    traceparent: Text = ""


class CancelPart(Request[Empty], frozen=True):
    """Ends a part; answered when nothing of it is in flight, nor will be.

    A `FetchPart` with this ``token`` that comes later is refused.
    """

    op: ClassVar[str] = "cancel_part"

    token: Secret


PREFILL_PEER_REQUESTS: tuple[type[Request[Any]], ...] = (
    Handshake,
    Claim,
    Renew,
    Take,
    Release,
    PeerWithdraw,
    Meet,
    Forgo,
    Pack,
    Unpack,
    Digest,
    CheckMemory,
    Status,
    Trace,
)
DECODE_PEER_REQUESTS: tuple[type[Request[Any]], ...] = (
    FetchPart,
    CancelPart,
    Cost,
    Status,
    Trace,
)
