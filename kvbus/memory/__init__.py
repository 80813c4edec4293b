"""Memory that an engine shares with its agent: segments, CUDA, the attach socket, copies.

Only ``cuda`` imports torch, which costs seconds: it is imported by name.

    segment   SharedSegment: the engine's memory, sealed and reserved
    pages     what is mapped, and how it ends
    mapping   SegmentMapping, LentMapping: the agent's side of either
    room      whether that much memory is there
    bus_errors  what happens when memory is cut that somebody has mapped
    copying   PagedMemory: one group's regions on one rank; gather and scatter between those and
              staging slots (run_copy: what runs them on the host)
    digest_pieces  digests of what is mapped, or gathered
    cuda      memory of GPUs
    attach    the Unix socket that passes the descriptors
"""

from kvbus.memory.bus_errors import BusErrors
from kvbus.memory.copying import PagedMemory, gather, scatter, zero_positions
from kvbus.memory.libc import map_shared, map_zeros_over, unmap
from kvbus.memory.mapping import LentMapping, SegmentMapping
from kvbus.memory.segment import GIVING_WORDS, HugePages, SharedSegment, huge_bytes, shmem_word

__all__ = [
    "GIVING_WORDS",
    "BusErrors",
    "HugePages",
    "LentMapping",
    "PagedMemory",
    "SegmentMapping",
    "SharedSegment",
    "gather",
    "huge_bytes",
    "map_shared",
    "map_zeros_over",
    "scatter",
    "shmem_word",
    "unmap",
    "zero_positions",
]
