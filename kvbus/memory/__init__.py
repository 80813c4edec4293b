"""Shared memory between an engine and its agent: segments, attach socket, tensor views.

Imports nothing by itself: torch costs seconds, and only ``storage``, ``views`` and
``copying`` with its parts need it.

    segment   SharedSegment: the engine's memory, sealed and reserved
    storage   share_tensor: a torch tensor moved to shared memory in place
    mapping   SegmentMapping: the agent's side of either
    room      whether that much memory is there
    views     tensors laid over a segment's bytes
    paged     PagedMemory: one group's regions on one rank
    copying   gather and scatter between those and staging slots (grids, units, tiles: its parts)
    attach    the Unix socket that passes the descriptors
"""
