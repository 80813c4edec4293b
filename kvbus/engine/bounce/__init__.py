"""Bounce buffers: for engines whose KV cache nothing outside of them can map.

The engine's own function copies between its cache and a bounded number of host blocks, which an
agent serves like any other KV cache.

    sizing          how many host blocks a buffer of so many bytes has
    host_pool       HostPool: the host blocks of all groups, and who waits for them
    request_blocks  RequestBlocks: the blocks of one request in both places, and what to copy
    buffer          HostBuffer: a rank's host blocks; LocalCopier: copies of all ranks, in threads
    prefill         HostPrefill, HostOffer: save blocks, and offer them
    decode          HostDecode, HostFetch: fetch into host blocks, and load
    blocking        the same for engines without an event loop; import it by its name
"""

from kvbus.engine.bounce.buffer import (
    Copier,
    CopyBlocks,
    Direction,
    HostBlocks,
    HostBuffer,
    LocalCopier,
)
from kvbus.engine.bounce.decode import HostDecode, HostFetch
from kvbus.engine.bounce.host_pool import BlockAllocator, HostPool
from kvbus.engine.bounce.prefill import HostOffer, HostPrefill
from kvbus.engine.bounce.request_blocks import BlockCopy, cut_into_copies
from kvbus.engine.bounce.sizing import HOST_LAYOUT, host_blocks, piece_tokens

__all__ = [
    "HOST_LAYOUT",
    "BlockAllocator",
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
    "cut_into_copies",
    "host_blocks",
    "piece_tokens",
]
