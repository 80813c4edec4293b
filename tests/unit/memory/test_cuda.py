"""The CUDA modules without a GPU: waits for its events, and errors where there is none.

tests/process/gpu has the rest.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain, repeat

import pytest
import torch

from kvbus.errors import ErrorCode, LocalError, SegmentError
from kvbus.memory import cuda
from kvbus.memory.cuda import wait_for

NEVER = 10**9


class Recorded:
    """An event that is done after so many queries."""

    def __init__(self, after: int) -> None:
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_all_events_are_awaited_and_done_ones_need_no_engine() -> None:
    events = [Recorded(3), Recorded(0), Recorded(5)]
    wait_for(events, gone=lambda: False)
    wait_for([Recorded(0)], gone=lambda: True)
    assert [event.left for event in events] == [-1, -1, -1]


def test_wait_gives_up_when_engine_is_gone_or_it_takes_too_long() -> None:
    gone = chain(repeat(False, 3), repeat(True))
    with pytest.raises(LocalError) as lost:
        wait_for([Recorded(2), Recorded(NEVER)], gone=lambda: next(gone))
    with pytest.raises(LocalError) as late:
        wait_for([Recorded(NEVER)], gone=lambda: False, timeout_s=0.01)
    assert (lost.value.code, late.value.code) == (ErrorCode.ENGINE_LOST, ErrorCode.TIMEOUT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/process/gpu")
def test_without_a_gpu_every_call_names_what_is_missing() -> None:
    calls: list[Callable[[], object]] = [
        cuda.check_cuda,
        lambda: cuda.gpu_ordinal("GPU-0"),
        lambda: cuda.gpu_of(torch.device("cuda:0")),
        lambda: cuda.allocate_cuda(4096, torch.device("cuda")),
        lambda: cuda.CudaMapping("GPU-0", bytes(64), offset_bytes=0, size_bytes=4096),
        *(partial(cuda.GpuSlots, 4096, 0, pinned=pinned) for pinned in (False, True)),
    ]
    for call in calls:
        with pytest.raises(SegmentError, match=r"CUDA|NVIDIA|GPU"):
            call()
