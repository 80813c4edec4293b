"""Serves reads of ranks whose engine has its home, and so its leases, at another agent.

Refuses more than the limit, and to serve for longer than was asked for: readers ask again.
"""

import asyncio
from dataclasses import dataclass

from kvbus.errors import ErrorCode, LocalError
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
        self._transport, self._loop, self._max_readers = transport, loop, max_readers
        self._attended: dict[Reader, _Attended] = {}

    def __len__(self) -> int:
        return len(self._attended)

    def begin(self, reader: Reader, *, for_s: float) -> None:
        """Serve a reader's reads for ``for_s`` from now; raises `LocalError` (``busy``)."""
        known = self._attended.get(reader)
        if known is None and len(self._attended) >= self._max_readers:
            raise LocalError(
                f"{len(self._attended)} readers are attended to, which is the limit",
                code=ErrorCode.BUSY,
            )
        if known is not None:
            known.until.cancel()
        until = self._loop.call_later(for_s, self.end, reader)
        demand = known.demand if known is not None else self._transport.hold_progress()
        self._attended[reader] = _Attended(demand, until)

    def end(self, reader: Reader) -> None:
        """Nothing more is read; one that is not known is ok."""
        known = self._attended.pop(reader, None)
        if known is not None:
            known.until.cancel()
            known.demand.close()
