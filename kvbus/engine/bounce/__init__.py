"""Bounce buffers: for engines whose KV cache nothing outside of them can map.

The engine's own function copies between its cache and a bounded number of host blocks, which an
agent serves like any other KV cache.

    pool     HostPool: the host blocks of all groups, how many, and who waits for them
    copies   RequestBlocks: the blocks of one request in both places; HostBuffer: a rank's host
             blocks; LocalCopier: copies of all ranks, in threads
    offers   HostPrefill, HostOffer: save blocks, and offer them
    fetches  HostDecode, HostFetch: fetch into host blocks, and load
"""
# ruff: noqa: F403  the files are the list

from kvbus.engine.bounce.copies import *
from kvbus.engine.bounce.fetches import *
from kvbus.engine.bounce.offers import *
from kvbus.engine.bounce.pool import *
