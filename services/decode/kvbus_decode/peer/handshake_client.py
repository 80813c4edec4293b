"""The handshake's request and reply: with the process that a ticket names, and with no other.

Refuses the reply of a process that came after that one: its tickets are stale.
"""

from kvbus.bus import RequestClient
from kvbus.errors import (
    ErrorCode,
    KVBusError,
    PeerLost,
    RemoteError,
    RequestRefused,
    RequestTimeout,
)
from kvbus.protocol.peer import Handshake, HandshakeDone
from kvbus.protocol.ticket import Ticket


async def ask_handshake(
    client: RequestClient, ticket: Ticket, handshake: Handshake, *, timeout_s: float
) -> HandshakeDone:
    """The reply; raises `RemoteError`: ``peer_unreachable``, ``stale``, or a refusal."""
    try:
        reply = await _ask(client, handshake, timeout_s, boot=ticket.agent_boot)
    except RequestTimeout as error:
        raise _unreachable(client) from error
    except KVBusError as error:
        if client.peer_boot in (None, ticket.agent_boot):
            raise
        raise _stale(client) from error
    if client.peer_boot != ticket.agent_boot:
        raise _stale(client)
    return reply


async def ask_any_handshake(
    client: RequestClient, handshake: Handshake, *, timeout_s: float
) -> tuple[str, HandshakeDone]:
    """The boot id of whatever process answers, and its reply; raises `RemoteError`.

    Its refusals name the agent: the ticket does not.
    """
    try:
        reply = await _ask(client, handshake, timeout_s)
    except RequestTimeout as error:
        raise _unreachable(client) from error
    except RequestRefused as error:
        message = f"the prefill agent at {client.endpoint}: {error.message}"
        raise RemoteError(message, code=error.code, endpoint=client.endpoint) from error
    return client.peer_boot or "", reply


async def _ask(
    client: RequestClient, handshake: Handshake, timeout_s: float, *, boot: str | None = None
) -> HandshakeDone:
    """Ask once more when the first answer was also the first sign of a new process, of ``boot``.

    A new boot id fails every request that waits, those that the new process got included.
    """
    try:
        return await client.ask(handshake, timeout_s=timeout_s)
    except PeerLost:
        if boot not in (None, client.peer_boot):
            raise
    return await client.ask(handshake, timeout_s=timeout_s)


def _unreachable(client: RequestClient) -> RemoteError:
    """Says what is known of the way there, and where to look."""
    where, missing = client.endpoint, client.missing
    look = (
        f"{missing}. Is it up, is its advertise_host an address that this machine reaches, is the "
        "port open on the way?"
        if missing
        else "there is a connection, but nothing comes by it. Is the agent stopped (kvbus status "
        f"{where}), or are packets of full size lost on the way (MTU)?"
    )
    return RemoteError(
        f"no prefill agent answers at {where}: {look}",
        code=ErrorCode.PEER_UNREACHABLE,
        endpoint=where,
    )


def _stale(client: RequestClient) -> RemoteError:
    return RemoteError(
        "the ticket is of an earlier process of the prefill agent",
        code=ErrorCode.STALE,
        endpoint=client.endpoint,
    )
