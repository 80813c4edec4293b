"""Messages that compare bytes: a reader asks for digests of what it has read."""

from typing import Annotated, ClassVar

import msgspec

from kvbus.geometry import BlockTable, Box
from kvbus.geometry.spec import Index
from kvbus.protocol.message import Id, Message, Request, Secret

MAX_DIGESTS = 1 << 17
"""Of one request; they take 1 MiB."""
MAX_ONE_IN = 1 << 16

OneIn = Annotated[int, msgspec.Meta(ge=1, le=MAX_ONE_IN)]
OneInOrNone = Annotated[int, msgspec.Meta(ge=0, le=MAX_ONE_IN)]


class Digests(Message, frozen=True):
    """Reply to `Digest`: 8 bytes, little-endian, for each piece that is compared."""

    digests: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DIGESTS)]


class Digest(Request[Digests], frozen=True):
    """Asks for the digests of a box of what one rank holds, as it is in memory now.

    About one in ``one_in`` pieces is digested, which ones follows from the offer's id. ``table``
    has the blocks of the box's positions, as the offer names them. It shows the ticket's secret.
    """

    op: ClassVar[str] = "digest"

    agent_boot: Id
    engine_id: Id
    memory_id: Id
    offer_id: Id
    rank: Index
    box: Box
    table: BlockTable
    one_in: OneIn
    secret: Secret
    access: Secret
