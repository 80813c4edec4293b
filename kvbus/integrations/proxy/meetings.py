"""Requests that go to both servers at once: each offer gets a name before it is made.

Refuses prefill servers whose agent is not known by a ticket yet, and sites that sign their tickets:
the proxy has no key to sign with.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from kvbus.errors import ProtocolError
from kvbus.integrations.proxy.bodies import TransferParams
from kvbus.integrations.proxy.servers import Server
from kvbus.protocol.ticket import Rendezvous, Ticket


class PrefillAgents:
    """The agent beside each prefill server, by the latest ticket that came from there."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}

    def learn(self, server: Server, params: Mapping[str, Any]) -> None:
        """Note whose ticket these params have, if it is one of kvbus."""
        try:
            ticket = Ticket.from_json(params.get("ticket"))
        except ProtocolError:
            return
        if not ticket.signature:
            self._tickets[server.url] = ticket

    def meet(self, server: Server, request_id: str) -> Rendezvous | None:
        """A new name for an offer of ``server``; None where it has to make a ticket first."""
        ticket = self._tickets.get(server.url)
        if ticket is None:
            return None
        return Rendezvous(
            uuid.uuid4().hex, ticket.endpoint, ticket.server_key, request_id=request_id
        )


def params_of(meets: Rendezvous) -> tuple[TransferParams, TransferParams]:
    """What the prefill server gets, and the decode server."""
    to_prefill = {"do_remote_decode": True, "transfer_id": meets.transfer_id}
    to_decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "rendezvous": meets.to_json(),
    }
    return to_prefill, to_decode
