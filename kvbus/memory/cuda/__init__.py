"""GPU memory, by the CUDA driver alone: no torch."""

from kvbus.memory.cuda.copier import GpuCopier as GpuCopier
from kvbus.memory.cuda.driver import driver_version as driver_version
from kvbus.memory.cuda.driver import read_bytes as read_bytes
from kvbus.memory.cuda.driver import write_bytes as write_bytes
from kvbus.memory.cuda.export import GpuAllocation as GpuAllocation
from kvbus.memory.cuda.export import GpuMemory as GpuMemory
from kvbus.memory.cuda.gpus import Gpu as Gpu
from kvbus.memory.cuda.gpus import check_ordinal as check_ordinal
from kvbus.memory.cuda.gpus import gpu_ordinal as gpu_ordinal
from kvbus.memory.cuda.gpus import gpu_uuid as gpu_uuid
from kvbus.memory.cuda.gpus import seen_gpus as seen_gpus
from kvbus.memory.cuda.mapping import CudaMapping as CudaMapping
from kvbus.memory.cuda.nvml import taken_bytes as taken_bytes
from kvbus.memory.cuda.slots import PinnedMemory as PinnedMemory
from kvbus.memory.cuda.slots import VramMemory as VramMemory
from kvbus.memory.cuda.slots import pin_for as pin_for
