"""What the CUDA modules say where there is no driver and no GPU; tests/gpu has the rest."""

from collections.abc import Callable

import pytest
import torch

from kvbus.errors import SegmentError
from kvbus.memory.cuda import CudaMapping, GpuSlots, allocate_cuda, check_cuda, gpu_of, gpu_ordinal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu")


@pytest.mark.parametrize(
    "call",
    [
        check_cuda,
        lambda: gpu_ordinal("GPU-0"),
        lambda: gpu_of(torch.device("cuda:0")),
        lambda: allocate_cuda(4096, torch.device("cuda")),
        lambda: CudaMapping("GPU-0", bytes(64), offset_bytes=0, size_bytes=4096),
        lambda: GpuSlots(4096, 0, pinned=False),
        lambda: GpuSlots(4096, 0, pinned=True),
    ],
)
def test_without_a_gpu_every_call_names_what_is_missing(call: Callable[[], object]) -> None:
    with pytest.raises(SegmentError, match=r"CUDA|NVIDIA|GPU"):
        call()
