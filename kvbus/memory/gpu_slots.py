"""Owns the memory of staging slots for one GPU: on it, or pinned host memory beside it."""

import torch

from kvbus.errors import ClosedError, SegmentError
from kvbus.memory.gpus import check_cuda


class GpuSlots:
    """So many bytes, zeroed; ``pinned`` in host memory, else on the GPU. Raises `SegmentError`."""

    def __init__(self, size_bytes: int, ordinal: int, *, pinned: bool) -> None:
        check_cuda()
        where = "pinned host memory" if pinned else f"GPU {ordinal}"
        try:
            if pinned:
                made = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                made = torch.zeros(size_bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
                torch.cuda.synchronize(ordinal)
        except RuntimeError as error:
            raise SegmentError(
                f"cannot allocate {size_bytes} bytes of staging in {where}: {error}",
                size_bytes=size_bytes,
            ) from error
        self._tensor: torch.Tensor | None = made

    @property
    def tensor(self) -> torch.Tensor:
        """All bytes as one uint8 tensor."""
        if self._tensor is None:
            raise ClosedError("the staging memory was closed")
        return self._tensor

    @property
    def address(self) -> int:
        """Where the first byte is."""
        return self.tensor.data_ptr()

    def close(self) -> None:
        """Let the memory go; idempotent."""
        self._tensor = None
