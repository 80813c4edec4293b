"""The GPUs that this process sees, by UUID as each process numbers them anew, and their slots."""

import torch

from kvbus.errors import ClosedError, SegmentError


def gpu_uuid(ordinal: int) -> str:
    """The UUID of a GPU that torch numbers so, as ``nvidia-smi -L`` prints it."""
    return f"GPU-{str(torch.cuda.get_device_properties(ordinal).uuid).removeprefix('GPU-')}"


def gpu_ordinal(uuid: str) -> int:
    """The number that torch has for a GPU; raises `SegmentError` when it does not see it."""
    check_cuda()
    visible = [gpu_uuid(ordinal) for ordinal in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise SegmentError(
            f"this process does not see {uuid}, but {', '.join(visible)}: start it with a "
            "CUDA_VISIBLE_DEVICES that has it, or none",
            device=uuid,
        )
    return visible.index(uuid)


def gpu_of(device: torch.device) -> int:
    """The number of a CUDA device, the current one when it names none; raises `SegmentError`."""
    check_cuda()
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if ordinal >= torch.cuda.device_count():
        raise SegmentError(
            f"there is no {device}: this process sees {torch.cuda.device_count()} GPUs"
        )
    return ordinal


def check_cuda() -> None:
    """Raise `SegmentError` unless torch can use a GPU here."""
    if torch.version.cuda is None:
        raise SegmentError(
            f"torch {torch.__version__} of this process has no CUDA: install a build of torch "
            "for CUDA, or use shared memory"
        )
    if not torch.cuda.is_available():
        raise SegmentError(
            "torch of this process sees no GPU: is the NVIDIA driver there, and "
            "CUDA_VISIBLE_DEVICES not empty?"
        )


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

    def view(self) -> torch.Tensor:
        """All bytes as one uint8 tensor."""
        if self._tensor is None:
            raise ClosedError("the staging memory was closed")
        return self._tensor

    @property
    def address(self) -> int:
        """Where the first byte is."""
        return self.view().data_ptr()

    def close(self) -> None:
        """Let the memory go; idempotent."""
        self._tensor = None
