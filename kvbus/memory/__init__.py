"""Shared memory between an engine and its agent: segments, attach socket, tensor views.

Imports nothing by itself: torch costs seconds, and only ``storage`` and ``views`` need it.

    segment   SharedSegment: the engine's memory, sealed and reserved
    storage   share_tensor: a torch tensor moved to shared memory in place
    mapping   SegmentMapping: the agent's side of either
    room      whether that much memory is there
    views     tensors laid over a segment's bytes
    attach    the Unix socket that passes the descriptors
"""
