"""The GPUs that this process sees: by UUID, as another process may number them differently."""

import torch

from kvbus.errors import SegmentError


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
