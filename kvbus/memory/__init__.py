"""Memory that an engine shares with its agent: segments, CUDA, attach socket, tensor views.

A name is imported when it is asked for: torch costs seconds, and only ``storage``, ``views`` and
those for GPUs need it.

    segment   SharedSegment: the engine's memory, sealed and reserved
    storage   share_tensor: a torch tensor moved to shared memory in place
    mapping   SegmentMapping: the agent's side of either
    room      whether that much memory is there
    cuda      CudaStorage: the engine's memory on a GPU (gpus, cuda_driver: its parts)
    cuda_mapping, copy_stream: the agent's side of that, and its copies
    views     tensors laid over a segment's bytes
    copying   PagedMemory: one group's regions on one rank; gather and scatter between those and
              staging slots (run_copy, gpu_copy: what runs them)
    attach    the Unix socket that passes the descriptors
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbus.memory.bus_errors import BusErrors
    from kvbus.memory.copy_stream import wait_for
    from kvbus.memory.copying import PagedMemory, Slot, gather, scatter, zero_positions
    from kvbus.memory.cuda import CudaStorage, allocate_cuda
    from kvbus.memory.cuda_driver import on_gpu
    from kvbus.memory.cuda_mapping import CudaMapping
    from kvbus.memory.gpus import GpuSlots, check_cuda, gpu_of, gpu_ordinal
    from kvbus.memory.huge_pages import GIVING_WORDS, HugePages, huge_bytes, shmem_word
    from kvbus.memory.libc import map_shared, map_zeros_over, unmap
    from kvbus.memory.mapping import LentMapping, SegmentMapping
    from kvbus.memory.pages import Pages
    from kvbus.memory.run_copy import is_compiled
    from kvbus.memory.segment import SharedSegment
    from kvbus.memory.storage import SharedStorage, share_tensor, share_tensors
    from kvbus.memory.views import dtype_from_name, region_view

_MODULES = {
    "bus_errors": "BusErrors",
    "copy_stream": "wait_for",
    "copying": "PagedMemory Slot gather scatter zero_positions",
    "cuda": "CudaStorage allocate_cuda",
    "cuda_mapping": "CudaMapping",
    "cuda_driver": "on_gpu",
    "gpus": "GpuSlots check_cuda gpu_of gpu_ordinal",
    "huge_pages": "GIVING_WORDS HugePages huge_bytes shmem_word",
    "libc": "map_shared map_zeros_over unmap",
    "mapping": "LentMapping SegmentMapping",
    "pages": "Pages",
    "run_copy": "is_compiled",
    "segment": "SharedSegment",
    "storage": "SharedStorage share_tensor share_tensors",
    "views": "dtype_from_name region_view",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, from the module that has it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "GIVING_WORDS",
    "BusErrors",
    "CudaMapping",
    "CudaStorage",
    "GpuSlots",
    "HugePages",
    "LentMapping",
    "PagedMemory",
    "Pages",
    "SegmentMapping",
    "SharedSegment",
    "SharedStorage",
    "Slot",
    "allocate_cuda",
    "check_cuda",
    "dtype_from_name",
    "gather",
    "gpu_of",
    "gpu_ordinal",
    "huge_bytes",
    "is_compiled",
    "map_shared",
    "map_zeros_over",
    "on_gpu",
    "region_view",
    "scatter",
    "share_tensor",
    "share_tensors",
    "shmem_word",
    "unmap",
    "wait_for",
    "zero_positions",
]
