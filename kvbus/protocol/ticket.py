"""What a router carries: the ticket of an offer, or a rendezvous before there is one.

Both are small maps that pass through any JSON. They are signed by keys that the agents of a site
share: `TicketKeys` refuses tickets that were altered, are of no known key, or are not of this time.
It knows no clock: times are seconds since 1970 and come from outside.
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
from kvbus.protocol.engine import Tables, WordName
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
"""Most blocks that a ticket can name; a prefill agent's configuration allows some of them."""
CLOCK_TOLERANCE_S = 30
"""How far the clocks of two agents may be apart."""
_Base64 = Annotated[str, msgspec.Meta(max_length=131_072)]
Audience = Text
"""The decode engine or agent that alone may use it, where tickets are signed; empty for any."""
IssuedAt = Size
"""When it was signed, in seconds since 1970; 0 without a signature."""
ExpiresAt = Size
"""Until when it is good; 0 without a signature."""
Version = int
"""Version of the ticket, or rendezvous: 1."""
Signature = Text
"""64 hexadecimal digits; see [Signed tickets](#signed-tickets). Empty when the site signs none."""


class Carried(Redacted, frozen=True):
    """A map of strings and integers, called ``what``."""

    what: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Strings and integers only, safe to pass through any JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """What is in ``fields``; raises `ProtocolError` that says what is wrong with it."""
        try:
            carried = msgspec.convert(fields, cls)
            msgspec.json.encode(carried)  # JSON can escape half a character, which cannot travel
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


class Ticket(Carried, frozen=True):
    """Names one offer of one prefill agent; whoever shows its ``secret`` may claim the offer."""

    what: ClassVar[str] = "ticket"

    agent_id: AgentId
    agent_boot: Id
    """Boot id of its process."""
    endpoint: Endpoint
    engine_id: EngineId
    engine_instance: Id
    """Stands for the engine's control session: a new one each time that one registers."""
    offer_id: OfferId
    request_id: Id
    """The prefill engine's name of the request."""
    num_tokens: Tokens
    """Tokens ready when the ticket was made; more may follow."""
    secret: Secret
    """The right to claim the offer, or withdraw it."""
    server_key: ServerKey = ""
    audience: Audience = ""
    prompt_digest: Text = ""
    """From ``offer``."""
    issued_at_s: IssuedAt = 0
    expires_at_s: ExpiresAt = 0
    kvbus: Version = TICKET_VERSION
    signature: Signature = ""
    blocks: _Base64 = ""
    """The block tables of an offer that is not written to any more: base64 of the msgpack map that
    ``offer`` had as ``tables``. A reader may read them at once, and ``take`` the offer after the
    last byte. Empty when the offer was open, or has too many."""
    traceparent: Text = ""
    """As in ``offer``. It is not signed."""
    word: WordName = 0
    """As in ``offer``. It is not signed: with another one the fetch takes longer, and no more."""

    def tables(self) -> dict[str, BlockTable]:
        """The block tables in ``blocks``, none when it is empty; raises `ProtocolError`."""
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


class Rendezvous(Carried, frozen=True):
    """Names an offer before there is one; made by whoever sends both engines the request."""

    what: ClassVar[str] = "rendezvous"

    transfer_id: Secret
    """The name of the offer, and the right to its ticket: 128 random bits."""
    endpoint: Endpoint
    server_key: ServerKey = ""
    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)] = ""
    """What the router calls the request, for logs."""
    audience: Audience = ""
    issued_at_s: IssuedAt = 0
    expires_at_s: ExpiresAt = 0
    kvbus: Version = TICKET_VERSION
    signature: Signature = ""

    @classmethod
    def is_one(cls, fields: object) -> bool:
        """Whether ``fields`` are meant to be a rendezvous, and not a ticket."""
        return isinstance(fields, dict) and "transfer_id" in fields

    def unknown_ticket(self) -> Ticket:
        """What is known of the ticket by now: where it will come from, and what it is for."""
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
    """``tables`` as the ``blocks`` of a ticket: base64 of msgpack; empty when they are too many."""
    if sum(len(table) for table in tables.values()) > max_blocks:
        return ""
    return base64.b64encode(msgspec.msgpack.encode(dict(tables))).decode()


T = TypeVar("T", Ticket, Rendezvous)


class TicketKeys:
    """The keys of a site: the first signs, any of them verifies, so that they can be replaced."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise LocalError("tickets are signed with one key at least")
        self._keys = tuple(keys)

    def sign(self, ticket: T, *, now_s: float, lifetime_s: float) -> T:
        """``ticket`` with its times and its signature."""
        issued_at_s = int(now_s)
        dated = msgspec.structs.replace(
            ticket, issued_at_s=issued_at_s, expires_at_s=issued_at_s + int(lifetime_s)
        )
        signature = _signature(self._keys[0], dated)
        return msgspec.structs.replace(dated, signature=signature)

    def check_signature(self, ticket: Ticket | Rendezvous) -> None:
        """Raise `LocalError` (``forbidden``) unless one of our keys signed exactly this ticket."""
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
        """Raise `LocalError` when the ticket is over, or from a time that has not come."""
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
    """HMAC-SHA256 of all other fields: compact JSON, in the order in which the page has them.

    Without ``blocks`` when there are none, and without ``traceparent`` and ``word``: agents that do
    not know these fields sign without them.
    """
    fields = msgspec.structs.replace(ticket, signature="").to_json()
    if not fields.get("blocks", True):
        del fields["blocks"]
    for name in ("traceparent", "word"):
        fields.pop(name, None)
    unsigned = msgspec.json.encode(fields)
    return hmac.digest(key, f"kvbus {ticket.what}\n".encode() + unsigned, "sha256").hex()


def prompt_digest(token_ids: Sequence[int], conditions: Iterable[str] = ("",)) -> str:
    """What a prompt is known by on both sides of a handoff; see [Prompt digest](#prompt-digest).

    Of its tokens, and of all else that their KV depends on: the name of the LoRA adapter, empty for
    none, and then what each image or other item is known by, in the order of the prompt.
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
