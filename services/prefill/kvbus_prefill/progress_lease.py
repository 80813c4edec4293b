"""Serves reads of ranks whose engine has its home, and so its leases, at another agent.

Refuses more than the limit, and to serve for longer than was asked for: readers ask again.
"""

import asyncio
from dataclasses import dataclass

from kvbus.table import Party, Places
from kvbus.transport import ProgressToken, Transport

Reader = tuple[str, str]
"""The boot id of the reader's session, and the offer that it reads."""


@dataclass(slots=True)
class _Attended:
    demand: ProgressToken
    until: asyncio.TimerHandle


class ProgressLeases:
    """The reads that this agent cannot see, of leases that are held elsewhere.

    NIXL serves nothing over TCP, and sets no connection up, unless progress is driven here.
    """

    def __init__(
        self, transport: Transport, loop: asyncio.AbstractEventLoop, *, max_readers: int
    ) -> None:
        self._transport, self._loop = transport, loop
        self._places: Places[Reader] = Places(max_readers)
        self._attended: dict[Reader, _Attended] = {}

    def __len__(self) -> int:
        return len(self._attended)

    def begin(self, reader: Reader, party: Party, *, for_s: float) -> None:
        """Serve a reader's reads for ``for_s`` from now; raises `LocalError` (``busy``).

        The reader of a party that has many may have to go for it, and asks again.
        """
        known = self._attended.get(reader)
        if known is not None:
            known.until.cancel()
        elif (lost := self._places.enter(party, reader)) is not None:
            self.end(lost)
        until = self._loop.call_later(for_s, self.end, reader)
        demand = known.demand if known is not None else self._transport.hold_progress()
        self._attended[reader] = _Attended(demand, until)

    def end(self, reader: Reader) -> None:
        """Nothing more is read; one that is not known is ok."""
        known = self._attended.pop(reader, None)
        self._places.leave(reader)
        if known is not None:
            known.until.cancel()
            known.demand.close()
