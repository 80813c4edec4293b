"""GPU memory, shared by CUDA IPC."""

from kvbus.memory.cuda.driver import check_cuda as check_cuda
from kvbus.memory.cuda.driver import gpu_of as gpu_of
from kvbus.memory.cuda.driver import gpu_ordinal as gpu_ordinal
from kvbus.memory.cuda.driver import seen_gpus as seen_gpus
from kvbus.memory.cuda.open import CopyStream as CopyStream
from kvbus.memory.cuda.open import CudaMapping as CudaMapping
from kvbus.memory.cuda.open import GpuMover as GpuMover
from kvbus.memory.cuda.open import GpuSlots as GpuSlots
from kvbus.memory.cuda.open import is_context_lost as is_context_lost
from kvbus.memory.cuda.share import CudaStorage as CudaStorage
from kvbus.memory.cuda.share import TorchStorage as TorchStorage
from kvbus.memory.cuda.share import allocate_cuda as allocate_cuda
from kvbus.memory.cuda.share import share_cuda_tensor as share_cuda_tensor
