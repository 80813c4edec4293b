"""GPUs that this process sees, by UUID."""

import uuid
from typing import NamedTuple

from kvbus.errors import SegmentError
from kvbus.memory.cuda import driver


class Gpu(NamedTuple):
    """``name`` is as in ``nvidia-smi -L``: ``GPU-`` or, for an instance under MIG, ``MIG-``."""

    name: str
    model: str
    size_bytes: int


def seen_gpus() -> list[Gpu]:
    """Return the GPUs in the driver's order. Raises `SegmentError` without a driver or a GPU."""
    found = [_gpu(ordinal) for ordinal in range(driver.num_gpus())]
    if not found:
        raise SegmentError("this process sees no GPU: check CUDA_VISIBLE_DEVICES")
    return found


def gpu_uuid(ordinal: int) -> str:
    whole, part = (driver.uuid_bytes(ordinal, of_instance=one) for one in (False, True))
    return f"{'GPU' if whole == part else 'MIG'}-{uuid.UUID(bytes=part)}"


def gpu_ordinal(name: str) -> int:
    """Return the ordinal of the GPU with this UUID, with ``GPU-`` or ``MIG-`` in front of it."""
    visible = [gpu.name for gpu in seen_gpus()]
    wanted = _without_kind(name)
    for ordinal, one in enumerate(visible):
        if _without_kind(one) == wanted:
            return ordinal
    raise SegmentError(
        f"this process does not see {name}, but {', '.join(visible)}: start it with a "
        "CUDA_VISIBLE_DEVICES that has it, or none",
        device=name,
    )


def check_ordinal(ordinal: int) -> None:
    """Raise `SegmentError` unless this process sees this GPU."""
    num_gpus = len(seen_gpus())
    if not 0 <= ordinal < num_gpus:
        number = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise SegmentError(f"there is no cuda:{ordinal}: this process sees {number}")


def _gpu(ordinal: int) -> Gpu:
    return Gpu(gpu_uuid(ordinal), driver.gpu_name(ordinal), driver.gpu_bytes(ordinal))


def _without_kind(name: str) -> str:
    return name.partition("-")[2].lower()
