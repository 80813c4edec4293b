"""The engine's side of CUDA memory."""

import torch

from kvbus.errors import ClosedError, GeometryError, SegmentError
from kvbus.memory.cuda import driver
from kvbus.memory.cuda.driver import gpu_of, gpu_uuid
from kvbus.memory.mapping import OwnedMemory


class TorchStorage(OwnedMemory):
    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage: torch.UntypedStorage | None = storage
        self.address, self.size_bytes = storage.data_ptr(), storage.nbytes()
        self.closed = False

    def offset_bytes_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self.address or storage.nbytes() != self.size_bytes:
            raise GeometryError("the tensor does not lie in this shared storage")
        return tensor.data_ptr() - self.address

    def close(self) -> None:
        self._storage, self.closed = None, True

    def _check_open(self) -> torch.UntypedStorage:
        if self._storage is None:
            raise ClosedError("the shared storage was closed")
        return self._storage


class CudaStorage(TorchStorage):
    """A GPU storage that an agent can open, ``offset_bytes`` into the allocation of ``handle``.

    Close it after the agent has: until then torch must not free the memory.
    """

    def __init__(self, storage: torch.UntypedStorage, *, handle: bytes, offset_bytes: int) -> None:
        super().__init__(storage)
        self.ordinal = gpu_of(storage.device)
        self.device = gpu_uuid(self.ordinal)
        self.handle, self.offset_bytes = handle, offset_bytes

    @property
    def tensor(self) -> torch.Tensor:
        storage = self._check_open()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage, 0, (self.size_bytes,), (1,))

    def __del__(self) -> None:
        """Do not warn: torch frees the memory."""


def share_cuda_tensor(tensor: torch.Tensor) -> CudaStorage:
    ordinal, storage = gpu_of(tensor.device), tensor.untyped_storage()
    if storage.nbytes() == 0:
        raise SegmentError("an empty tensor has no memory to share")
    with driver.on_gpu(ordinal):
        allocation = driver.allocation_of(storage.data_ptr())
        try:
            if allocation is None:
                raise SegmentError("CUDA does not know the allocation")
            handle = driver.export_memory(allocation[0])
        except SegmentError as error:
            raise SegmentError(
                f"a tensor of {storage.nbytes()} bytes on {tensor.device} cannot be opened by "
                f"another process: {error.message}. Memory of expandable segments cannot, nor that "
                "of the asynchronous allocator: start the engine with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native",
                size_bytes=storage.nbytes(),
            ) from error
    return CudaStorage(storage, handle=handle, offset_bytes=storage.data_ptr() - allocation[0])


def allocate_cuda(size_bytes: int, device: torch.device | str) -> CudaStorage:
    ordinal = gpu_of(torch.device(device))
    try:
        tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
        torch.cuda.synchronize(ordinal)  # zero before another process may write
    except RuntimeError as error:
        raise SegmentError(
            f"cannot allocate {size_bytes} bytes on {device}: {error}", size_bytes=size_bytes
        ) from error
    return share_cuda_tensor(tensor)
