"""Memory of GPUs, shared by CUDA IPC; imported by name only, as torch costs seconds.

driver   GPUs by UUID, and the driver's calls
share    the engine's side: CudaStorage, CudaEvent
open     the agent's side: CudaMapping, CopyStream, GpuSlots, GpuMover
survey   what torch can do with the GPUs of this machine
"""

from kvbus.memory.cuda.driver import check_cuda, gpu_of, gpu_ordinal, on_gpu
from kvbus.memory.cuda.open import CopyStream, CudaMapping, GpuMover, GpuSlots, wait_for
from kvbus.memory.cuda.share import (
    CudaEvent,
    CudaStorage,
    TorchStorage,
    allocate_cuda,
    share_cuda_tensor,
)

__all__ = [
    "CopyStream",
    "CudaEvent",
    "CudaMapping",
    "CudaStorage",
    "GpuMover",
    "GpuSlots",
    "TorchStorage",
    "allocate_cuda",
    "check_cuda",
    "gpu_of",
    "gpu_ordinal",
    "on_gpu",
    "share_cuda_tensor",
    "wait_for",
]
