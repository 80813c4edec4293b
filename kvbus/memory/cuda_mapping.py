"""Owns the agent's side of an engine's CUDA memory: opened, laid out as bytes, closed again.

Refuses to trust the engine: the handle must open, and what is claimed must lie in the allocation.
Unlike host memory it cannot be replaced by zeros: who copies has to have ended before `unmap`.
"""

import torch

from kvbus.errors import ClosedError, SegmentError
from kvbus.memory import cuda_driver
from kvbus.memory.gpus import gpu_ordinal
from kvbus.memory.owned import OwnedMemory


class CudaMapping(OwnedMemory):
    """An engine's CUDA memory, open here.

    ``device`` is the GPU's UUID. Takes milliseconds, and seconds for the first of a process: call
    it in a thread. Raises `SegmentError`.
    """

    def __init__(self, device: str, handle: bytes, *, offset_bytes: int, size_bytes: int) -> None:
        self._base: int | None = None
        self._tensor: torch.Tensor | None = None
        self.device, self.size_bytes = device, size_bytes
        self.ordinal = gpu_ordinal(device)
        if len(handle) != cuda_driver.HANDLE_BYTES:
            raise SegmentError(
                f"a CUDA memory handle has {cuda_driver.HANDLE_BYTES} bytes, not {len(handle)}"
            )
        _make_context(self.ordinal)
        with cuda_driver.on_gpu(self.ordinal):
            self._base = base = cuda_driver.open_memory(handle)
        try:
            self._check_extent(base, offset_bytes)
            self._tensor = _bytes_at(base + offset_bytes, size_bytes, self.ordinal)
        except RuntimeError as error:
            self.unmap()
            raise SegmentError(
                f"{size_bytes} bytes from byte {offset_bytes} on were claimed of a CUDA "
                f"allocation, and torch cannot use them: {error}"
            ) from error
        except BaseException:
            self.unmap()
            raise

    @property
    def closed(self) -> bool:
        return self._base is None

    def view(self) -> torch.Tensor:
        """All bytes as one uint8 tensor on the GPU; of no use after `unmap`."""
        if self._tensor is None:
            raise ClosedError("the CUDA memory was closed: its engine is gone")
        return self._tensor

    def discard(self) -> None:
        """Nothing can be given back yet: `unmap` follows once no copy runs."""

    def unmap(self) -> None:
        """Close the memory, so that a dead engine's is free; idempotent.

        No copy may run. Call it in a thread: the driver may wait for the GPU.
        """
        base, self._base = self._base, None
        self._tensor = None
        if base is not None:
            with cuda_driver.on_gpu(self.ordinal):
                cuda_driver.close_memory(base)

    close = unmap

    def _check_extent(self, base: int, offset_bytes: int) -> None:
        with cuda_driver.on_gpu(self.ordinal):
            allocation = cuda_driver.allocation_of(base)
        if allocation is not None and offset_bytes + self.size_bytes > allocation[1]:
            raise SegmentError(
                f"{self.size_bytes} bytes from byte {offset_bytes} on were claimed of a CUDA "
                f"allocation of {allocation[1]}",
                claimed_bytes=offset_bytes + self.size_bytes,
                actual_bytes=allocation[1],
            )


def _make_context(ordinal: int) -> None:
    """Have torch make the GPU's primary context, which it then keeps for the process's life."""
    try:
        torch.zeros(1, device=f"cuda:{ordinal}")
    except RuntimeError as error:
        raise SegmentError(f"GPU {ordinal} cannot be used: {error}") from error


class _Extent:
    """What torch reads to lay a tensor over device memory that it does not own."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "strides": None,
            "data": (address, False),
        }


def _bytes_at(address: int, size_bytes: int, ordinal: int) -> torch.Tensor:
    return torch.as_tensor(_Extent(address, size_bytes), device=f"cuda:{ordinal}")
