"""The memory of a prefill engine of this machine, mapped here, and the connection that it hangs on.

Refuses to take addresses away from who may still copy from them: when the engine ends they read
zeros, and they go when nobody holds the object any more.
"""

import time
import weakref
from collections.abc import Mapping

from kvbus.memory.attach.channel import FrameChannel
from kvbus.memory.mapping import LentMapping
from kvbus_decode.peer.directory import Extent

POPULATE_WITHIN_S = 2.0

Lent = Mapping[tuple[int, str], LentMapping]
"""Each segment of each rank."""


# Who copies knows addresses only, in a thread that nobody can stop. So these rules:
#
#     the engine or its agent ends   end-of-file ──▶ `close`, then zeros under all addresses;
#                                    `is_open` is False before the first one is there
#     its file is cut                SIGBUS in a copy ──▶ zeros there, `is_open` is False; the loop
#                                    then hangs up, and all of it is zeros
#     nobody of ours wants it        the route is dropped: nothing changes for a fetch that still
#                                    holds this object, as its take may get a yes
#     nobody holds it                the connection is hung up, and the addresses go
#
# A copy that has read a zero for a byte therefore finds `is_open` False when it asks afterwards.
# To unmap takes tens of milliseconds a GiB, and the last holder may be the event loop. So it only
# hangs up: the task that waits for the end of the connection unmaps in a thread.
class MappedMemory:
    """Where each segment of the ranks is in this process, read-only, as long as somebody has this.

    ``who`` is the engine and its agent, for people; ``extents`` are all of it, in order of address.
    """

    def __init__(self, who: str, channel: FrameChannel, lent: Lent) -> None:
        self.who = who
        self.addresses: dict[int, dict[str, int]] = {}
        for (rank, segment_id), mapping in lent.items():
            self.addresses.setdefault(rank, {})[segment_id] = mapping.address
        mappings = tuple(lent.values())
        self.extents: tuple[Extent, ...] = tuple(
            sorted((one.address, one.address + one.size_bytes) for one in mappings)
        )
        self.closed = ""
        """Why it is not open any more; empty while it is."""
        self._pages = tuple(one.pages for one in mappings)
        self.hang_up = weakref.finalize(self, channel.hang_up)
        """Have it unmapped, once it is closed; so it is when nobody holds it any more."""
        self.hang_up.atexit = False

    @property
    def is_open(self) -> bool:
        """Whether every byte there is, and was until now, the engine's own."""
        return not self.closed

    @property
    def num_bytes(self) -> int:
        """How much is mapped."""
        return sum(end - first for first, end in self.extents)

    def cut(self) -> None:
        """Some of it is gone; from any thread."""
        self.close("the prefill engine cut its memory")

    def close(self, reason: str) -> None:
        """No copy from it counts any more; the first reason stays."""
        self.closed = self.closed or reason

    def populate(self) -> None:
        """Enter pages into the page table, so that no copy has to: in a thread, for two seconds."""
        deadline = time.monotonic() + POPULATE_WITHIN_S
        for pages in self._pages:
            if not self.is_open:
                return
            pages.populate(deadline - time.monotonic())
