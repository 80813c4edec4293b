"""Asks prefill agents for the tickets of offers that are known by a name, before they are made."""

from collections.abc import Callable
from functools import partial

import structlog

from kvbus.errors import KVBusError
from kvbus.protocol.rendezvous import Forgo, Meet, Met
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer.directory import PeerAddress
from kvbus_decode.peer.lease_client import RELEASE_TIMEOUT_S, LeaseClient, luck
from kvbus_decode.tickets import TicketGate

log = structlog.get_logger()

WAIT = 0.8
"""Of the time that a request has, the part that the prefill agent may wait before it answers."""


class MeetingClient:
    """For fetches that were given a `Rendezvous`; ``dispatch`` takes the answers."""

    def __init__(
        self, leases: LeaseClient, tickets: TicketGate, dispatch: Callable[[ev.Event], None]
    ) -> None:
        self._leases, self._tickets, self._dispatch = leases, tickets, dispatch

    def meet(self, command: ev.SendMeet) -> None:
        """Ask for the ticket."""
        requested, timeout_s = command.requested, command.timeout_s
        try:
            fetch = self._leases.begin(requested)
        except KVBusError as error:
            self._dispatch(ev.StepFailed(command.fetch_id, error))
            return
        name = requested.ticket.secret  # the rendezvous says no more of the ticket
        message = Meet(transfer_id=name, wait_s=WAIT * timeout_s)
        fetch.home.ask(message, timeout_s, partial(self._on_met, requested))

    def forgo(self, command: ev.SendForgo) -> None:
        """Have the offer withdrawn; when that fails, it ends by itself."""
        meets = command.meets
        try:
            peer = self._leases.peers.acquire(PeerAddress(meets.endpoint, meets.server_key))
        except KVBusError as error:
            log.info("offer.kept", request_id=meets.request_id, reason=error.message)
            return
        message = Forgo(transfer_id=meets.transfer_id)
        peer.ask(message, RELEASE_TIMEOUT_S, lambda _: self._leases.peers.release(peer))

    def _on_met(self, requested: ev.Requested, reply: Met | KVBusError) -> None:
        fetch_id = requested.fetch_id
        try:
            if isinstance(reply, KVBusError):
                raise reply
            ticket = self._tickets.admit_ticket(
                reply.ticket, requested.engine_id, requested.prompt_digest
            )
        except KVBusError as error:
            self._dispatch(ev.StepFailed(fetch_id, error, luck()))
        else:
            self._dispatch(ev.OfferMet(fetch_id, ticket))
