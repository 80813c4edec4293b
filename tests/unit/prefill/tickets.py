"""Tickets of offers that no agent has made."""

from kvbus.protocol import MakeOffer, Ticket


def ticket_for(message: MakeOffer, offer_id: str, secret: str) -> Ticket:
    """Of an engine that is called ``engine``."""
    return Ticket(
        agent_id="prefill",
        agent_boot="boot",
        endpoint="tcp://127.0.0.1:1",
        engine_id="engine",
        engine_instance="instance",
        offer_id=offer_id,
        request_id=message.request_id,
        num_tokens=message.num_tokens,
        secret=secret,
    )
