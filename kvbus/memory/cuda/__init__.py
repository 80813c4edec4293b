"""Memory of GPUs, shared by CUDA IPC; imported by name only, as torch costs seconds.

driver   GPUs by UUID, and the driver's calls
share    the engine's side: CudaStorage, CudaEvent
open     the agent's side: CudaMapping, CopyStream, GpuSlots, GpuMover
survey   what torch can do with the GPUs of this machine
"""
