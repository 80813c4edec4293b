"""Owns the question what torch can do with the GPUs of this machine.

Refuses to be imported where nobody asked: torch costs seconds, and CUDA memory of its own. Run it
in a process that ends.
"""

from dataclasses import dataclass
from typing import Any

import torch

_NUM_ELEMENTS = 1 << 20
_MARK = 42


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """One GPU: its UUID as nvidia-smi has it, its name, its memory."""

    uuid: str
    name: str
    memory_bytes: int


def seen_gpus() -> list[SeenGpu]:
    """The GPUs that torch sees; raises `RuntimeError` that says why there is none."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no type; says why it cannot
    found = [torch.cuda.get_device_properties(num) for num in range(torch.cuda.device_count())]
    if not found:
        raise RuntimeError("no GPU is visible: look at CUDA_VISIBLE_DEVICES")
    return [SeenGpu(f"GPU-{one.uuid}", one.name, one.total_memory) for one in found]


def cuda_version() -> str:
    """The CUDA that torch was built for; empty when it was for none."""
    return torch.version.cuda or ""


def marked_tensor() -> torch.Tensor:
    """A tensor of the first GPU that another process can recognise."""
    tensor = torch.full((_NUM_ELEMENTS,), _MARK, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return tensor


def exported(tensor: torch.Tensor) -> list[Any]:
    """What another process needs to open the storage: plain numbers, flags and bytes."""
    return list(tensor.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]  # as above


def is_marked(fields: list[Any]) -> bool:
    """Open what another process exported, and see whether it is its marked tensor."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # as above
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    tensor.set_(storage, 0, (_NUM_ELEMENTS,), (1,))
    return bool((tensor == _MARK).all().item())
