"""What a router carries: the ticket of an offer, or a rendezvous before there is one.

Both are small maps that pass through any JSON. They are signed by keys that the agents of a site
share: `TicketKeys` refuses tickets that were altered, are of no known key, or are not of this time.
It knows no clock: times are seconds since 1970 and come from outside.
"""

import base64
import hmac
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgpack
import msgspec

from kvbus.errors import ErrorCode, LocalError, ProtocolError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Tables
from kvbus.protocol.envelope import unpack_map
from kvbus.protocol.message import Discreet, Endpoint, Id, Secret, Size, Text, Tokens

TICKET_VERSION = RENDEZVOUS_VERSION = 1
MAX_REQUEST_ID = 256
UNKNOWN = "-"
MAX_TICKET_BLOCKS = 16_384
"""Most blocks that a ticket can name; a prefill agent's configuration allows some of them."""
CLOCK_TOLERANCE_S = 30
"""How far the clocks of two agents may be apart."""
_Base64 = Annotated[str, msgspec.Meta(max_length=131_072)]


class Carried(Discreet, frozen=True):
    """A map of strings and integers, called ``what``, of one ``version``."""

    what: ClassVar[str]
    version: ClassVar[int]

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
            raise ProtocolError(f"{cls.what}: {error}", code=ErrorCode.INVALID) from error
        theirs: int = getattr(carried, "kvbus", 0)
        if theirs != cls.version:
            raise ProtocolError(
                f"{cls.what} is of version {theirs}, this side reads {cls.version}",
                code=ErrorCode.UNSUPPORTED_VERSION,
                theirs=theirs,
                ours=cls.version,
            )
        return carried


class Ticket(Carried, frozen=True):
    """Names one offer of one prefill agent; whoever shows its ``secret`` may claim the offer.

    ``server_key`` is the agent's CURVE key, in Z85; empty when it has none. Only the decode engine
    or agent of the name ``audience`` may use it; all when that is empty. It is good until
    ``expires_at_s`` (seconds since 1970), where the site signs its tickets (`TicketKeys`).
    ``blocks`` are the tables of an offer that the engine does not write to any more, see `tables`;
    empty when it still does, or they are too many. ``traceparent`` is the trace of the request, and
    opens nothing: it is not signed.
    """

    what: ClassVar[str] = "ticket"
    version: ClassVar[int] = TICKET_VERSION

    agent_id: Id
    agent_boot: Id
    endpoint: Endpoint
    engine_id: Id
    engine_instance: Id
    offer_id: Id
    request_id: Id
    num_tokens: Tokens
    secret: Secret
    server_key: Text = ""
    audience: Text = ""
    prompt_digest: Text = ""
    issued_at_s: Size = 0
    expires_at_s: Size = 0
    kvbus: int = TICKET_VERSION
    signature: Text = ""
    blocks: _Base64 = ""
    traceparent: Text = ""

    def tables(self) -> dict[str, BlockTable]:
        """The block tables in ``blocks``, none when it is empty; raises `ProtocolError`."""
        if not self.blocks:
            return {}
        try:
            packed = base64.b64decode(self.blocks, validate=True)
            tables = msgspec.convert(unpack_map(packed), Tables, builtin_types=(bytes,))
        except (ValueError, ProtocolError, msgspec.ValidationError) as error:
            message = f"blocks of the ticket are not block tables: {error}"
            raise ProtocolError(message, code=ErrorCode.INVALID) from error
        return tables


class Rendezvous(Carried, frozen=True):
    """Names an offer before there is one; made by whoever sends both engines the request.

    ``transfer_id`` is random, and the right to the ticket. ``endpoint`` is the prefill agent's peer
    socket, ``server_key`` its CURVE key; ``request_id`` is for logs. The rest is as in a `Ticket`.
    """

    what: ClassVar[str] = "rendezvous"
    version: ClassVar[int] = RENDEZVOUS_VERSION

    transfer_id: Secret
    endpoint: Endpoint
    server_key: Text = ""
    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)] = ""
    audience: Text = ""
    issued_at_s: Size = 0
    expires_at_s: Size = 0
    kvbus: int = RENDEZVOUS_VERSION
    signature: Text = ""

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
    fields = msgspec.to_builtins(dict(tables), builtin_types=(bytes,))
    return base64.b64encode(msgpack.packb(fields)).decode()


T = TypeVar("T", Ticket, Rendezvous)
_CONTEXT = {Ticket: b"kvbus ticket\n", Rendezvous: b"kvbus rendezvous\n"}


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
            raise LocalError(
                f"the ticket {problem}: 'ticket_keys' of the prefill agent and of this one must "
                "have a key in common",
                code=ErrorCode.FORBIDDEN,
            )

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

    Without ``blocks`` when there are none, and without ``traceparent``: agents that do not know
    these fields sign without them.
    """
    fields = msgspec.structs.replace(ticket, signature="").to_json()
    if not fields.get("blocks", True):
        del fields["blocks"]
    fields.pop("traceparent", None)
    unsigned = msgspec.json.encode(fields)
    return hmac.digest(key, _CONTEXT[type(ticket)] + unsigned, "sha256").hex()
