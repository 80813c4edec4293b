"""Signatures of tickets, by keys that the agents of a site share.

Refuses tickets that were altered, are of no known key, or are not of this time. Knows no clock:
times are seconds since 1970 and come from outside.
"""

import hmac
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.rendezvous import Rendezvous
from kvbus.protocol.ticket import Ticket

T = TypeVar("T", Ticket, Rendezvous)

CLOCK_TOLERANCE_S = 30
"""How far the clocks of two agents may be apart."""
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
