"""Bounce buffers: for engines whose KV cache nothing outside of them can map.

The engine's own function copies between its cache and a bounded number of host blocks, which an
agent serves like any other KV cache.

    sizing            how many host blocks a buffer of so many bytes has
    block_pool        BlockPool: free block ids, handed out in long runs
    host_pool         HostPool: the host blocks of all groups, and who waits for them
    copies            BlockCopy: what to copy between device and host
    request_blocks    RequestBlocks: the blocks of one request in both places
    buffer            HostBuffer: a rank's host blocks, and the calls of the engine's function
    copier            LocalCopier: copies of all ranks of this process, in threads
    prefill           HostPrefill: save blocks, and offer them
    decode            HostDecode: fetch into host blocks, and load
    fetch             HostFetch: one of its fetches
    blocking          the same for engines without an event loop; import it by its name
"""

from kvbus.engine.bounce.buffer import CopyBlocks, Direction, HostBlocks, HostBuffer
from kvbus.engine.bounce.copier import Copier, LocalCopier
from kvbus.engine.bounce.copies import BlockCopy
from kvbus.engine.bounce.decode import HostDecode
from kvbus.engine.bounce.fetch import HostFetch
from kvbus.engine.bounce.host_pool import HostPool
from kvbus.engine.bounce.prefill import HostOffer, HostPrefill
from kvbus.engine.bounce.sizing import HOST_LAYOUT, host_blocks

__all__ = [
    "HOST_LAYOUT",
    "BlockCopy",
    "Copier",
    "CopyBlocks",
    "Direction",
    "HostBlocks",
    "HostBuffer",
    "HostDecode",
    "HostFetch",
    "HostOffer",
    "HostPool",
    "HostPrefill",
    "LocalCopier",
    "host_blocks",
]
