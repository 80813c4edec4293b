"""Memory that an engine shares with its agent: segments, CUDA, the attach socket, copies.

Only ``cuda`` imports torch, which costs seconds: it is imported by name.

    mapping   MappedFile, and SegmentMapping: what another process passed
    segment   SharedSegment: the engine's memory, sealed and reserved
    room      whether that much memory is there
    bus_errors  what happens when memory is cut that somebody has mapped
    copying   PagedMemory: one group's regions on one rank; gather and scatter between those and
              staging slots (run_copy: what runs them on the host)
    cuda      memory of GPUs
    attach    the Unix socket that passes the descriptors
"""
