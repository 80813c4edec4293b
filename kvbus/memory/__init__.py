"""Memory that an engine shares with its agent: segments, CUDA, attach socket, tensor views.

Imports nothing by itself: torch costs seconds, and only ``storage``, ``views``, ``copying`` with
its parts and those for GPUs need it.

    segment   SharedSegment: the engine's memory, sealed and reserved
    storage   share_tensor: a torch tensor moved to shared memory in place
    mapping   SegmentMapping: the agent's side of either
    room      whether that much memory is there
    cuda      CudaStorage: the engine's memory on a GPU (gpus, cuda_driver: its parts)
    cuda_mapping, copy_stream: the agent's side of that, and its copies
    views     tensors laid over a segment's bytes
    paged     PagedMemory: one group's regions on one rank
    copying   gather and scatter between those and staging slots (grids, units, tiles: its parts)
    attach    the Unix socket that passes the descriptors
"""
