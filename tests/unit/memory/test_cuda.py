"""The CUDA modules without a GPU: errors where there is none.

tests/process/gpu has the rest.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvbus.errors import SegmentError
from kvbus.memory import cuda
from kvbus.memory.cuda.sequence import StreamWords


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/process/gpu")
def test_without_a_gpu_every_call_names_what_is_missing() -> None:
    calls: list[Callable[[], object]] = [
        cuda.check_cuda,
        lambda: cuda.gpu_ordinal("GPU-0"),
        lambda: cuda.gpu_of(torch.device("cuda:0")),
        lambda: cuda.allocate_cuda(4096, torch.device("cuda")),
        lambda: cuda.CudaMapping("GPU-0", bytes(64), offset_bytes=0, size_bytes=4096),
        lambda: StreamWords(0, 0, 4096),
        *(partial(cuda.GpuSlots, 4096, 0, pinned=pinned) for pinned in (False, True)),
    ]
    for call in calls:
        with pytest.raises(SegmentError, match=r"CUDA|NVIDIA|GPU"):
            call()
