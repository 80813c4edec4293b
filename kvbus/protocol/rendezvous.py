"""The rendezvous: what a router gives a decode engine in place of a ticket that does not exist yet.

Refuses a map that lacks a field or is of another version. Whoever shows its ``transfer_id`` gets
the ticket as soon as the prefill engine has made an offer of that name.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.protocol.message import (
    Discreet,
    Empty,
    Endpoint,
    Message,
    Request,
    Seconds,
    Secret,
    Size,
    Text,
)
from kvbus.protocol.ticket import Ticket

RENDEZVOUS_VERSION = 1
MAX_REQUEST_ID = 256
UNKNOWN = "-"


class Rendezvous(Discreet, frozen=True):
    """Names an offer before there is one; made by whoever sends both engines the request.

    ``transfer_id`` is random, and the right to the ticket. ``endpoint`` is the prefill agent's peer
    socket, ``server_key`` its CURVE key; ``request_id`` is for logs. The rest is as in a `Ticket`.
    """

    transfer_id: Secret
    endpoint: Endpoint
    server_key: Text = ""
    request_id: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)] = ""
    audience: Text = ""
    issued_at_s: Size = 0
    expires_at_s: Size = 0
    kvbus: int = RENDEZVOUS_VERSION
    signature: Text = ""

    def to_json(self) -> dict[str, Any]:
        """Strings and integers only, safe to pass through any JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def is_one(cls, fields: object) -> bool:
        """Whether ``fields`` are meant to be a rendezvous, and not a ticket."""
        return isinstance(fields, dict) and "transfer_id" in fields

    @classmethod
    def from_json(cls, fields: object) -> "Rendezvous":
        """The rendezvous in ``fields``; raises `ProtocolError` that says what is wrong with it."""
        try:
            rendezvous = msgspec.convert(fields, cls)
            msgspec.json.encode(rendezvous)  # JSON can escape half a character
        except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
            raise ProtocolError(f"rendezvous: {error}", code=ErrorCode.INVALID) from error
        if rendezvous.kvbus != RENDEZVOUS_VERSION:
            raise ProtocolError(
                f"rendezvous is of version {rendezvous.kvbus}, this side reads "
                f"{RENDEZVOUS_VERSION}",
                code=ErrorCode.UNSUPPORTED_VERSION,
                theirs=rendezvous.kvbus,
                ours=RENDEZVOUS_VERSION,
            )
        return rendezvous

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
