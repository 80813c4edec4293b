"""Tickets of offers that no agent has made."""

from kvbus.protocol import MakeOffer, Ticket


def ticket_for(message: MakeOffer, offer_id: str, secret: str) -> Ticket:
    engine = "prefill", "boot", "tcp://127.0.0.1:1", "engine", "instance"
    return Ticket(*engine, offer_id, message.request_id, message.num_tokens, secret)
