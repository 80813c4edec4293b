"""Owns NIXL agents that were replaced, as READs of theirs never ended; calls none of them again."""

import ctypes
import time
from collections.abc import Iterable, Mapping

from kvbus.errors import TransferFailed
from kvbus.transport.scheduler import ReadScheduler
from kvbus.transport.types import RecycleReport, Registration

MOST_RETIRED = 16
"""Agents that are kept; each costs some 10 descriptors and 4 MB. After that there is no new one."""


# NIXL cannot take a READ back, and one from a peer that is stopped, or behind a link that drops
# everything, never ends. What it can still do depends on who writes:
#
#     TCP, shared memory   UCX, in this process, when its agent is driven. One that is never called
#                          again writes nothing, so it is kept, with its connections
#     RDMA                 the NIC, by itself: the agent is destroyed, and its queue pairs with it
#
# Tried with nixl 1.5.1 over TCP, and over shared memory without CMA, with a peer that was stopped
# before or within its answer and went on while the new agent read from it: no byte landed after
# either. But UCX aborts a peer whose answer finds its connection closed ("unexpected error:
# Endpoint timeout": 4 of 4 when it was destroyed, 0 of 4 when it was kept). And to destroy one is
# to drive it: what the peer has sent meanwhile lands then. So one that is kept is kept for ever, by
# a reference that is never given up: neither the garbage collector nor the end of the process ends
# it. Those that must be destroyed are before their READs are said to have ended.
#
# A peer is added to the new agent when it is first read from: that connects, which may not be
# possible now.
class AgentRecycler:
    """Replaces agents; on the transport's thread.

    With ``destroys`` they are ended, as a NIC writes for them.
    """

    def __init__(self, *, destroys: bool) -> None:
        self._destroys = destroys
        self.num_retired = 0
        self.retired_at = 0.0

    def replace(
        self,
        old: ReadScheduler,
        new: ReadScheduler,
        registrations: Iterable[Registration],
        peers: Mapping[str, Iterable[bytes]],
    ) -> RecycleReport:
        """Have ``new`` take over what waits; what is posted at ``old`` ends: nothing is in flight.

        Raises `KVBusError` when memory cannot be registered, or an agent not be destroyed, or too
        many are kept.
        """
        if self.num_retired >= MOST_RETIRED and not self._destroys:
            raise TransferFailed(f"{MOST_RETIRED} NIXL agents are kept already, which is the limit")
        for registration in registrations:
            new.agent.register(registration)
        for peer, blobs in peers.items():
            new.agent.add_peer_later(peer, blobs)
        num_handles = old.num_handles
        self._retire(old)
        error = TransferFailed("NIXL was made anew under the read, as another one never ended")
        for job in old.hand_over(error):
            new.add(job)
        return RecycleReport(num_handles=num_handles)

    def _retire(self, old: ReadScheduler) -> None:
        """From here on nothing of ``old`` lands."""
        if self._destroys:
            old.destroy_agent()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(old))
        self.num_retired += 1
        self.retired_at = time.time()
