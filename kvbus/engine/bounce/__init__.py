"""Bounce buffers: for engines whose KV cache no other process can map.

The engine's own function copies between its cache and host blocks. An agent serves the host blocks
like any other KV cache.

    pool     HostPool: the host blocks of all groups, and the queue for them
    copies   RequestBlocks: a request's blocks on device and host; HostBuffer: a rank's host
             blocks; LocalCopier: copies of all ranks, in threads
    offers   HostPrefill, HostOffer: save blocks, and offer them
    fetches  HostDecode, HostFetch: fetch into host blocks, and load
"""
# ruff: noqa: F403  all public names of these modules

from kvbus.engine.bounce.copies import *
from kvbus.engine.bounce.fetches import *
from kvbus.engine.bounce.offers import *
from kvbus.engine.bounce.pool import *
