"""The ticket: the small JSON-able map that a router carries from prefill to decode.

Refuses a map that lacks a field or is of another version; knows nothing of what the ticket opens.
"""

from typing import Any

import msgspec

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.protocol.message import Discreet, Endpoint, Id, Secret, Size, Text, Tokens

TICKET_VERSION = 1


class Ticket(Discreet, frozen=True):
    """Names one offer of one prefill agent; whoever shows its ``secret`` may claim the offer.

    ``server_key`` is the agent's CURVE key, in Z85; empty when it has none. Only the decode engine
    or agent of the name ``audience`` may use it; all when that is empty. It is good until
    ``expires_at_s`` (seconds since 1970), where the site signs its tickets (`TicketKeys`).
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
