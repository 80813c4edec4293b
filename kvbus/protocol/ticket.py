"""Credentials that a router carries: the ticket of an offer, or a rendezvous before there is one.

Both are small maps that pass through any JSON, signed with keys of the site. Times are seconds
since 1970.
"""

import base64
import hmac
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from kvbus.errors import ErrorCode, LocalError, ProtocolError, reason_of
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import CellName, Tables
from kvbus.protocol.envelope import MAX_PEER_ITEMS, unpack_map
from kvbus.protocol.message import (
    AgentId,
    Endpoint,
    EngineId,
    Id,
    OfferId,
    Redacted,
    Secret,
    ServerKey,
    Size,
    Text,
    Tokens,
)

TICKET_VERSION = 1
MAX_REQUEST_ID = 256
UNKNOWN = "-"
MAX_TICKET_BLOCKS = 16_384
"""Upper bound of a prefill agent's ``ticket_blocks``."""
CLOCK_TOLERANCE_S = 30
"""Largest difference between the clocks of two agents."""
PackedTables = Annotated[str, msgspec.Meta(max_length=131_072)]
Audience = Text
"""The only decode engine or agent that may use it, where tickets are signed; empty for any."""
IssuedAt = Size
"""Time of the signature, in seconds since 1970; 0 without a signature."""
ExpiresAt = Size
"""End of its validity, in seconds since 1970; 0 without a signature."""
Version = int
"""Version of the ticket or rendezvous: 1."""
Signature = Text
"""64 hexadecimal digits; see [Signed tickets](#signed-tickets). Empty where tickets are not signed.
"""


class RouterTicket(Redacted, frozen=True):
    """A map of strings and integers; ``what`` is its name in messages."""

    what: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """Raise `ProtocolError` with the reason."""
        try:
            carried = msgspec.convert(fields, cls)
            msgspec.json.encode(carried)  # JSON can escape a lone surrogate, which UTF-8 cannot
        except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
            raise ProtocolError(
                f"{cls.what}: {reason_of(error)}", code=ErrorCode.INVALID
            ) from error
        theirs: int = getattr(carried, "kvbus", 0)
        if theirs != TICKET_VERSION:
            raise ProtocolError(
                f"{cls.what} is of version {theirs}, this side reads {TICKET_VERSION}",
                code=ErrorCode.UNSUPPORTED_VERSION,
                theirs=theirs,
                ours=TICKET_VERSION,
            )
        return carried


class Ticket(RouterTicket, frozen=True):
    """The name of one offer of one prefill agent. Its ``secret`` is the right to acquire it."""

    what: ClassVar[str] = "ticket"

    agent_id: AgentId
    agent_boot: Id
    """Boot id of its process."""
    endpoint: Endpoint
    engine_id: EngineId
    engine_instance: Id
    """Instance of the engine: the ``instance`` of its control session, or one that the agent chose.
    """
    offer_id: OfferId
    request_id: Id
    """The prefill engine's id of the request."""
    num_tokens: Tokens
    """Tokens that were ready when the ticket was made; more may follow."""
    secret: Secret
    """The right to acquire or withdraw the offer."""
    server_key: ServerKey = ""
    audience: Audience = ""
    prompt_digest: Text = ""
    """As in ``offer``."""
    issued_at_s: IssuedAt = 0
    expires_at_s: ExpiresAt = 0
    kvbus: Version = TICKET_VERSION
    signature: Signature = ""
    blocks: PackedTables = ""
    """Block tables of an offer with blocks that are not written any longer: base64 of the msgpack
    map ``tables`` of ``offer``. A reader may read these blocks immediately, and ``commit`` the
    offer after the last byte. Empty if the offer was open or has too many blocks."""
    traceparent: Text = ""
    """As in ``offer``. Not signed."""
    cell: CellName = 0
    """As in ``offer``. Not signed: a wrong value only makes the fetch slower."""

    def tables(self) -> dict[str, BlockTable]:
        """Return the block tables in ``blocks``. Raises `ProtocolError`."""
        if not self.blocks:
            return {}
        try:
            packed = base64.b64decode(self.blocks, validate=True)
            named = unpack_map(packed, max_items=MAX_PEER_ITEMS)
            tables = msgspec.convert(named, Tables, builtin_types=(bytes,))
        except (ValueError, ProtocolError, msgspec.ValidationError) as error:
            message = f"blocks of the ticket are not block tables: {reason_of(error)}"
            raise ProtocolError(message, code=ErrorCode.INVALID) from error
        return tables


class Rendezvous(RouterTicket, frozen=True):
    """The name of an offer before there is a ticket. The router that sends the request to both
    engines makes it.
    """

    what: ClassVar[str] = "rendezvous"

    transfer_id: Secret
    """Name of the offer, and the right to its ticket: 128 random bits."""
    endpoint: Endpoint
    server_key: ServerKey = ""
    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)] = ""
    """Router's name of the request, for logs."""
    audience: Audience = ""
    issued_at_s: IssuedAt = 0
    expires_at_s: ExpiresAt = 0
    kvbus: Version = TICKET_VERSION
    signature: Signature = ""

    @classmethod
    def is_one(cls, fields: object) -> bool:
        """Return whether ``fields`` are meant as a rendezvous, not as a ticket."""
        return isinstance(fields, dict) and "transfer_id" in fields

    def unknown_ticket(self) -> Ticket:
        """Return a ticket with placeholders for unknown fields."""
        return Ticket(
            agent_id=UNKNOWN,
            agent_boot=UNKNOWN,
            endpoint=self.endpoint,
            engine_id=UNKNOWN,
            engine_instance=UNKNOWN,
            offer_id=UNKNOWN,
            request_id=self.request_id or UNKNOWN,
            num_tokens=0,
            secret=self.transfer_id,
            server_key=self.server_key,
        )


def packed_tables(tables: Mapping[str, BlockTable], *, max_blocks: int) -> str:
    """Return ``blocks`` of a ticket; empty if there are over ``max_blocks``."""
    if sum(len(table) for table in tables.values()) > max_blocks:
        return ""
    return base64.b64encode(msgspec.msgpack.encode(dict(tables))).decode()


def pooled_ticket(
    ticket: Ticket, *, engine_id: str, engine_instance: str, blocks: str, cell: int
) -> Ticket:
    """Return the ticket of a parked offer: it names the pool in place of the engine."""
    return msgspec.structs.replace(
        ticket, engine_id=engine_id, engine_instance=engine_instance, blocks=blocks, cell=cell
    )


T = TypeVar("T", Ticket, Rendezvous)


class TicketKeys:
    """The keys of a site. The first one signs and all verify, for rotation."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise LocalError("tickets are signed with one key at least")
        self._keys = tuple(keys)

    def sign(self, ticket: T, *, now_s: float, lifetime_s: float) -> T:
        issued_at_s = int(now_s)
        dated = msgspec.structs.replace(
            ticket, issued_at_s=issued_at_s, expires_at_s=issued_at_s + int(lifetime_s)
        )
        signature = _signature(self._keys[0], dated)
        return msgspec.structs.replace(dated, signature=signature)

    def check_signature(self, ticket: Ticket | Rendezvous) -> None:
        """Raise `LocalError` (``forbidden``) unless one of the keys signed exactly this ticket."""
        shown = ticket.signature.encode()
        ours = (_signature(key, ticket).encode() for key in self._keys)
        if not any(hmac.compare_digest(one, shown) for one in ours):
            problem = "was altered, or signed with another key" if shown else "is not signed"
            remedy = (
                "'ticket_keys' of the prefill agent and of this one must have a key in common"
                if isinstance(ticket, Ticket)
                else "the router must sign it with a key of 'ticket_keys', or send prefill first"
            )
            raise LocalError(f"the {ticket.what} {problem}: {remedy}", code=ErrorCode.FORBIDDEN)

    def check_times(self, ticket: Ticket | Rendezvous, *, now_s: float) -> None:
        """Raise `LocalError` if the ticket has expired, or was issued in the future."""
        maker = f"agent '{ticket.agent_id}'" if isinstance(ticket, Ticket) else "the router"
        early_s, late_s = ticket.issued_at_s - now_s, now_s - ticket.expires_at_s
        if late_s > CLOCK_TOLERANCE_S:
            raise LocalError(
                f"the ticket expired {late_s:.0f} s ago, by the clock of this machine; if it is "
                f"fresh, that clock or the one of {maker} is wrong",
                code=ErrorCode.OFFER_EXPIRED,
                late_s=round(late_s),
            )
        if early_s > CLOCK_TOLERANCE_S:
            raise LocalError(
                f"the ticket was issued {early_s:.0f} s in the future, by the clock of this "
                f"machine: that clock or the one of {maker} is wrong",
                code=ErrorCode.FORBIDDEN,
                early_s=round(early_s),
            )


def _signature(key: bytes, ticket: Ticket | Rendezvous) -> str:
    """Return the HMAC-SHA256 of the other fields: compact JSON, in the order of the protocol page.

    Empty ``blocks``, ``traceparent`` and ``cell`` are left out: older agents do not know these.
    """
    fields = msgspec.structs.replace(ticket, signature="").to_json()
    if not fields.get("blocks", True):
        del fields["blocks"]
    for name in ("traceparent", "cell"):
        fields.pop(name, None)
    unsigned = msgspec.json.encode(fields)
    return hmac.digest(key, f"kvbus {ticket.what}\n".encode() + unsigned, "sha256").hex()


def prompt_digest(token_ids: Sequence[int], conditions: Iterable[str] = ("",)) -> str:
    """Return the digest that identifies a prompt at both engines.

    ``conditions`` are the other inputs of the KV: first the name of the LoRA adapter, empty for
    none. Then comes the identifier of each image or other item, in prompt order.
    """
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    digest = blake2b(digest_size=16)
    texts = [condition.encode(errors="surrogatepass") for condition in conditions]
    for part in (ids.tobytes(), *texts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
