"""An offer without blocks, which waits for the end of its request; see `Offers`."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from threading import Event

from kvbus.engine import Offer, PrefillSession


class State(Enum):
    """Of a reservation; changed in the link's thread only."""

    OPEN = auto()
    PUBLISHED = auto()
    ABANDONED = auto()
    UNWANTED = auto()
    """Its reader has given it up."""


@dataclass(slots=True, eq=False)
class Reservation:
    """An open offer without blocks, for the ticket of a request that is being computed.

    ``asked`` is the session whose agent has made the offer, or is making it: one of each session.
    ``told`` are the blocks of each group that the offer has by now; extensions have turns. An offer
    with ``transfer_id`` is made once. ``refusal`` is why its agent made none.
    """

    request_id: str
    prompt_digest: str = ""
    transfer_id: str | None = None
    ttl_s: float | None = None
    readers: int = 1
    traceparent: str = ""
    told: dict[str, int] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: State = State.OPEN
    asked: PrefillSession | None = None
    offer: Offer | None = None
    refusal: str = ""
    is_made: Event = field(default_factory=Event)

    def untold(self, block_ids: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """What of each table the offer has not yet; from here on it has."""
        more = {group: ids[self.told.get(group, 0) :] for group, ids in block_ids.items()}
        self.told = {group: len(ids) for group, ids in block_ids.items()}
        return {group: ids for group, ids in more.items() if ids}
