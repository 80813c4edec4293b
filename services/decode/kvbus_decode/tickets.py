"""Validation of tickets, before the agent connects to a prefill agent."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.ticket import Rendezvous, Ticket, TicketKeys

MAX_COMPLETED = 65_536


class TicketGate:
    def __init__(self, agent_id: str, keys: TicketKeys | None) -> None:
        self._agent_id, self._keys = agent_id, keys
        self._completed: OrderedDict[tuple[str, str], None] = OrderedDict()

    def admit(
        self, fields: Mapping[str, Any], engine_id: str, digest: str = ""
    ) -> Ticket | Rendezvous:
        """Return the valid ticket or rendezvous. Raises `LocalError` or `ProtocolError`."""
        if not Rendezvous.is_one(fields):
            return self.admit_ticket(fields, engine_id, digest)
        rendezvous = Rendezvous.from_json(fields)
        if self._keys is not None:
            self._keys.check_signature(rendezvous)
            self._keys.check_times(rendezvous, now_s=time.time())
        self._check_audience(rendezvous.audience, engine_id)
        return rendezvous

    def admit_ticket(self, fields: Mapping[str, Any], engine_id: str, digest: str) -> Ticket:
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
        """Return the ticket with a valid signature; a part's home has checked the rest."""
        ticket = Ticket.from_json(fields)
        if self._keys is not None:
            self._keys.check_signature(ticket)
        return ticket

    def complete(self, ticket: Ticket) -> None:
        if self._keys is not None:
            self._completed[ticket.agent_boot, ticket.offer_id] = None
            if len(self._completed) > MAX_COMPLETED:
                self._completed.popitem(last=False)

    def _check_audience(self, audience: str, engine_id: str) -> None:
        if self._keys is not None and audience not in ("", self._agent_id, engine_id):
            raise LocalError(
                f"the ticket is for '{audience}', not for '{engine_id}' at '{self._agent_id}'",
                code=ErrorCode.FORBIDDEN,
            )

    def _check_prompt(self, ticket: Ticket, expected: str) -> None:
        """Accept an unsigned ticket without a digest for any prompt."""
        known = self._keys is not None or ticket.prompt_digest
        if expected and known and ticket.prompt_digest != expected:
            raise LocalError(
                "the ticket is of another prompt than the fetch, or names none",
                code=ErrorCode.PROMPT_MISMATCH,
            )
