"""Host staging: for engines whose KV cache nothing outside of them can map.

Refuses to know devices: the engine's own function copies between its cache and a bounded ring of
host blocks, which an agent serves like any other KV cache.

    sizing    how many blocks a ring of so many bytes has
    runs      FreeRuns: free block ids, handed out in long runs
    ring      HostRing: the blocks of all groups, and who waits for them
    copies    what to copy between device and ring, in runs (pure)
    buffer    HostBuffer: a rank's part of the ring, and the calls of the engine's function
    copier    LocalCopier: copies of all ranks of this process, in threads
    prefill   HostPrefill: save blocks, and offer them
    decode    HostDecode: fetch into the ring, and load
    fetch     HostFetch: one of its fetches

    request_blocks    RequestBlocks: the blocks of one request in both places
    blocking          the same for engines without an event loop; import it by its name
"""

from kvbus.engine.bounce.buffer import CopyBlocks, Direction, HostBlocks, HostBuffer
from kvbus.engine.bounce.copier import Copier, LocalCopier
from kvbus.engine.bounce.copies import BlockCopy
from kvbus.engine.bounce.decode import HostDecode
from kvbus.engine.bounce.fetch import HostFetch
from kvbus.engine.bounce.prefill import HostOffer, HostPrefill
from kvbus.engine.bounce.ring import HostRing
from kvbus.engine.bounce.sizing import RING_LAYOUT, ring_blocks

__all__ = [
    "RING_LAYOUT",
    "BlockCopy",
    "Copier",
    "CopyBlocks",
    "Direction",
    "HostBlocks",
    "HostBuffer",
    "HostDecode",
    "HostFetch",
    "HostOffer",
    "HostPrefill",
    "HostRing",
    "LocalCopier",
    "ring_blocks",
]
