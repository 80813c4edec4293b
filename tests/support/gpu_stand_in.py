"""Host memory that an agent in this process takes for a GPU's: what is not CUDA itself is real.

Only four things are replaced: the number of GPUs, opening a handle, the stream that copies run on,
and the choice of the memory for slots. So its data process is a thread of the test's process.
"""

import ctypes
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from kvbus.engine import Connection, KvCache
from kvbus.errors import SegmentError
from kvbus.geometry import lay_out_rank
from kvbus.memory import cuda
from kvbus.memory.cuda import CudaMapping
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import PassCuda, Register
from tests.support import inside_agents
from tests.support.engines import NUM_BLOCKS, Engine, make_spec
from tests.support.memories import NHD
from tests.support.strict_links import StrictLink

GPU = "GPU-stand-in"
WITHIN_S = 30.0
T = TypeVar("T")


class OpenedHandle(CudaMapping):
    """What a handle stands for, until it is closed."""

    def __init__(self, gpu: "StandIn", tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._gpu = gpu
        self.device, self.size_bytes, self.ordinal = GPU, tensor.numel(), 0

    def close(self) -> None:
        self._tensor = None
        self._gpu.num_open -= 1


class StandIn:
    """The GPU: its memory by handle, what is open of it, and the copies that its stream ran."""

    def __init__(self) -> None:
        self.memory: dict[bytes, torch.Tensor] = {}
        self.num_open = self.num_copies = 0
        self.slots: list[SharedSegment] = []
        self.may_copy = threading.Event()
        self.may_copy.set()

    def open(
        self, _device: str, handle: bytes, *, offset_bytes: int, size_bytes: int
    ) -> OpenedHandle:
        if handle not in self.memory:
            raise SegmentError("no such handle")
        self.num_open += 1
        return OpenedHandle(self, self.memory[handle][offset_bytes : offset_bytes + size_bytes])

    def stream(self, _ordinal: int) -> "StandIn":
        return self

    def run(self, copy: Callable[[], T]) -> T:
        self.num_copies += 1
        assert self.may_copy.wait(WITHIN_S)
        return copy()

    def ordinal(self, gpu: str) -> int:
        assert gpu == GPU
        return 0

    def open_slots(self, size_bytes: int, _ordinal: int, *, pinned: bool) -> SharedSegment:
        assert pinned
        self.slots.append(SharedSegment(size_bytes, name="gpu-slots"))
        return self.slots[-1]

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Be the GPU of all data processes that are threads of this process."""
        replace_cuda(
            patch,
            CudaMapping=self.open,
            CopyStream=self.stream,
            GpuSlots=self.open_slots,
            gpu_ordinal=self.ordinal,
        )


def replace_cuda(patch: pytest.MonkeyPatch, **names: Any) -> None:
    """Have the driver show a GPU, and these names of `kvbus.memory.cuda` be others."""

    def count(found: Any) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 1
        return 0

    driver = SimpleNamespace(cuDeviceGetCount=count)
    patch.setattr("kvbus.memory.nvidia.nvidia_driver", lambda: driver)
    for name, one in names.items():
        patch.setattr(cuda, name, one)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A GPU for every agent of this process that is made later."""
    made = StandIn()
    made.stand_in(monkeypatch)
    monkeypatch.setattr(inside_agents, "spawner", inside_agents.thread_spawner)
    yield made
    for slots_memory in made.slots:
        slots_memory.close()


@asynccontextmanager
async def engine_on(gpu: StandIn, attach: Any, *, seed: int) -> AsyncIterator[Engine]:
    """An engine of one rank with its KV there, as `tests.support.engines.engine` makes others."""
    spec = make_spec()
    async with Connection(attach, spec.engine_id) as connection:
        rank = lay_out_rank(spec, 0, NHD, num_blocks=NUM_BLOCKS)
        segment = rank.segments[0]
        whole = np.zeros(512 + segment.size_bytes, np.uint8)
        handle = len(gpu.memory).to_bytes(64, "little")
        gpu.memory[handle] = torch.from_numpy(whole)
        passed = PassCuda(
            segment_id=segment.segment_id,
            device=GPU,
            handle=handle,
            offset_bytes=512,
            size_bytes=segment.size_bytes,
        )
        await connection.pass_memory(passed)
        await connection.request(Register(engine=spec, rank=rank))
        caches = [KvCache(spec, rank, torch.from_numpy(whole[512:]))]
        async with StrictLink(attach, spec, caches=caches) as control:
            made = Engine(spec, control, caches, NUM_BLOCKS)
            made.fill(seed)
            yield made
            control.check_at_end()
