"""Which fetches are read by the blocks that their tickets name, before there is a lease.

Refuses those that need one: a box is packed under an epoch, and agents that have no lease to look
at are asked to drive their part of a read as long as it lasts.
"""

from kvbus.planning import Path
from kvbus_decode.fetch.ahead import Ahead
from kvbus_decode.fetch.events import Requested
from kvbus_decode.peer.route import Route
from kvbus_decode.read.reader import Reader


def ahead_of(requested: Requested, route: Route, reader: Reader) -> Ahead | None:
    """What the fetch can read at once, on a route that is known; None when it has to claim first.

    Raises `ProtocolError` when the ticket's blocks are none.
    """
    if not names_all(requested) or route.others or route.engine.others:
        return None
    path = reader.path_without_lease(route, requested)
    if path is None:
        return None
    # Only the prefill agent's progress ends a READ over TCP, or one that has to connect first: the
    # lease makes it drive. A copy here needs nobody.
    return Ahead(requested.ticket.tables(), claims=path is Path.DIRECT)


def names_all(requested: Requested) -> bool:
    """Whether the ticket names blocks, and they hold all that is wanted, in one chunk."""
    ticket, num_tokens = requested.ticket, requested.num_tokens
    if not ticket.blocks or requested.chunk_tokens or ticket.num_tokens < num_tokens:
        return False
    return ticket.num_tokens == num_tokens or not requested.has_state
