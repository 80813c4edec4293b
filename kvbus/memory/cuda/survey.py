"""Owns the question what torch can do with the GPUs of this machine.

Run it in a process that ends: torch costs seconds, and CUDA memory of its own.
"""

import torch

from kvbus.memory.cuda.driver import gpu_uuid
from kvbus.memory.cuda.open import CudaMapping
from kvbus.memory.cuda.share import CudaStorage, share_cuda_tensor

_NUM_ELEMENTS = 1 << 20
_MARK = 42


def seen_gpus() -> list[tuple[str, str, int]]:
    """The UUID, name and bytes of each GPU that torch sees; `RuntimeError` says why of none."""
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} is built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no type; says why it cannot
    found = [torch.cuda.get_device_properties(num) for num in range(torch.cuda.device_count())]
    if not found:
        raise RuntimeError("no GPU is visible: look at CUDA_VISIBLE_DEVICES")
    return [(gpu_uuid(num), one.name, one.total_memory) for num, one in enumerate(found)]


def cuda_version() -> str:
    """The CUDA that torch was built for; empty when it was for none."""
    return torch.version.cuda or ""


def lent_memory() -> CudaStorage:
    """Memory of the first GPU that another process can recognise, to be passed as an engine does.

    Raises `SegmentError`.
    """
    tensor = torch.full((_NUM_ELEMENTS,), _MARK, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return share_cuda_tensor(tensor)


def is_lent(device: str, handle: bytes, *, offset_bytes: int, size_bytes: int) -> bool:
    """Whether it is what another process lends, opened as an agent does; raises `SegmentError`."""
    with CudaMapping(device, handle, offset_bytes=offset_bytes, size_bytes=size_bytes) as mapping:
        return bool((mapping.view()[:_NUM_ELEMENTS] == _MARK).all().item())
