"""The ticket: the small JSON-able map that a router carries from prefill to decode.

Refuses a map that lacks a field or is of another version; knows nothing of what the ticket opens.
"""

import base64
from collections.abc import Mapping
from typing import Annotated, Any

import msgpack
import msgspec

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import Tables
from kvbus.protocol.message import Discreet, Endpoint, Id, Secret, Size, Text, Tokens
from kvbus.protocol.unpack import unpack_map

TICKET_VERSION = 1
MAX_TICKET_BLOCKS = 16_384
"""Most blocks that a ticket can name; a prefill agent's configuration allows some of them."""
_Base64 = Annotated[str, msgspec.Meta(max_length=131_072)]


class Ticket(Discreet, frozen=True):
    """Names one offer of one prefill agent; whoever shows its ``secret`` may claim the offer.

    ``server_key`` is the agent's CURVE key, in Z85; empty when it has none. Only the decode engine
    or agent of the name ``audience`` may use it; all when that is empty. It is good until
    ``expires_at_s`` (seconds since 1970), where the site signs its tickets (`TicketKeys`).
    ``blocks`` are the tables of an offer that the engine does not write to any more, see `tables`;
    empty when it still does, or they are too many. ``traceparent`` is the trace of the request, and
    opens nothing: it is not signed.
    """

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

    def to_json(self) -> dict[str, Any]:
        """Strings and integers only, safe to pass through any JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def from_json(cls, fields: object) -> "Ticket":
        """The ticket in ``fields``; raises `ProtocolError` that says what is wrong with it."""
        try:
            ticket = msgspec.convert(fields, cls)
            msgspec.json.encode(ticket)  # JSON can escape half a character, which cannot travel
        except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
            raise ProtocolError(f"ticket: {error}", code=ErrorCode.INVALID) from error
        if ticket.kvbus != TICKET_VERSION:
            raise ProtocolError(
                f"ticket is of version {ticket.kvbus}, this side reads {TICKET_VERSION}",
                code=ErrorCode.UNSUPPORTED_VERSION,
                theirs=ticket.kvbus,
                ours=TICKET_VERSION,
            )
        return ticket


def packed_tables(tables: Mapping[str, BlockTable], *, max_blocks: int) -> str:
    """``tables`` as the ``blocks`` of a ticket: base64 of msgpack; empty when they are too many."""
    if sum(len(table) for table in tables.values()) > max_blocks:
        return ""
    fields = msgspec.to_builtins(dict(tables), builtin_types=(bytes,))
    return base64.b64encode(msgpack.packb(fields)).decode()
