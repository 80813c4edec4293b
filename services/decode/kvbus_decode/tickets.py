"""Which tickets this agent acts on, decided before anything is connected to.

Refuses, where the site signs its tickets, those that were altered, are for somebody else, of
another prompt, of another time, or that have been read here.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.engine import StartFetch
from kvbus.protocol.ticket import Rendezvous, Ticket, TicketKeys

MAX_COMPLETED = 65_536


class TicketGate:
    """Reads the tickets of fetches; ``keys`` are those of the site, None when it signs none."""

    def __init__(self, agent_id: str, keys: TicketKeys | None) -> None:
        self._agent_id, self._keys = agent_id, keys
        self._completed: OrderedDict[tuple[str, str], None] = OrderedDict()

    def admit(self, fetch: StartFetch, engine_id: str) -> Ticket | Rendezvous:
        """What a fetch for ``engine_id`` shows; raises `LocalError` or `ProtocolError`."""
        if not Rendezvous.is_one(fetch.ticket):
            return self.admit_ticket(fetch.ticket, engine_id, fetch.prompt_digest)
        meets = Rendezvous.from_json(fetch.ticket)
        if self._keys is not None:
            self._keys.check_signature(meets)
            self._keys.check_times(meets, now_s=time.time())
        self._check_audience(meets.audience, engine_id)
        return meets

    def admit_ticket(self, fields: Mapping[str, Any], engine_id: str, digest: str) -> Ticket:
        """A ticket of the prompt with this digest; raises as `admit` does."""
        ticket, keys = self.read(fields), self._keys
        self._check_prompt(ticket, digest)
        if keys is None:
            return ticket
        keys.check_times(ticket, now_s=time.time())
        self._check_audience(ticket.audience, engine_id)
        if (ticket.agent_boot, ticket.offer_id) in self._completed:
            raise LocalError("the offer was read here already", code=ErrorCode.OFFER_COMPLETED)
        return ticket

    def read(self, fields: Mapping[str, Any]) -> Ticket:
        """A ticket as it was signed; of another agent's fetch, which has looked at the rest."""
        ticket = Ticket.from_json(fields)
        if self._keys is not None:
            self._keys.check_signature(ticket)
        return ticket

    def complete(self, ticket: Ticket) -> None:
        """The offer was read and taken: its ticket is no good any more."""
        if self._keys is not None:
            self._completed[ticket.agent_boot, ticket.offer_id] = None
            if len(self._completed) > MAX_COMPLETED:
                self._completed.popitem(last=False)

    def _check_audience(self, audience: str, engine_id: str) -> None:
        """It is for whom it names, where it is known who made it."""
        if self._keys is not None and audience not in ("", self._agent_id, engine_id):
            raise LocalError(
                f"the ticket is for '{audience}', not for '{engine_id}' at '{self._agent_id}'",
                code=ErrorCode.FORBIDDEN,
            )

    def _check_prompt(self, ticket: Ticket, expected: str) -> None:
        """A ticket without a digest is of any prompt, unless it is known who made it."""
        known = self._keys is not None or ticket.prompt_digest
        if expected and known and ticket.prompt_digest != expected:
            raise LocalError(
                "the ticket is of another prompt than the fetch, or names none",
                code=ErrorCode.PROMPT_MISMATCH,
            )
