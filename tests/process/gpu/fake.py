"""These tests on the fake driver: memory of its GPUs is memory of this process, too."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from kvbus.engine import RankMemory
from kvbus.memory import cuda
from kvbus.memory.cuda import GpuAllocation
from kvbus.memory.segment import SharedSegment
from tests.support.cuda import load, view

MARK = "KVBUS_TESTS_ON_FAKE_CUDA"
ON_FAKE = MARK in os.environ
KERNELS = Path(cuda.__file__).with_name("copy_lattice.cu")
SLEPT_CYCLES = 2_000_000
"""Of a GPU, in about a millisecond."""

if ON_FAKE:
    load()


def on_fake(patch: pytest.MonkeyPatch) -> None:
    """Have `RankMemory.tensor` be a view of memory that torch takes for the host's."""
    patch.setattr(RankMemory, "tensor", property(_tensor))


def tensor_at(address: int, size_bytes: int) -> torch.Tensor:
    """A view of memory of the first GPU, which the caller keeps alive."""
    if ON_FAKE:
        return torch.from_numpy(view(address, size_bytes))
    return torch.as_tensor(_Row(address, size_bytes), device="cuda:0")


class _Row:
    def __init__(self, address: int, size_bytes: int) -> None:
        shape = {"typestr": "|u1", "shape": (size_bytes,), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**shape, "data": (address, False)}


def _tensor(memory: RankMemory) -> torch.Tensor:
    (storage,) = memory.storages.values()
    if not isinstance(storage, GpuAllocation):
        assert isinstance(storage, SharedSegment)
        return storage.tensor
    row = torch.from_numpy(view(storage.address, storage.size_bytes))
    _kept[row.untyped_storage().data_ptr()] = storage
    return row


_kept: dict[int, GpuAllocation] = {}
"""Torch's views of a card keep its memory alive; these do not."""


def delay(stream: int, milliseconds: int) -> None:
    """Queue a pause on the stream."""
    if ON_FAKE:
        ctypes.CDLL("libcuda.so.1").fake_cuda_delay(ctypes.c_void_p(stream), milliseconds)
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):  # type: ignore[no-untyped-call]
            torch.cuda._sleep(SLEPT_CYCLES * milliseconds)  # type: ignore[no-untyped-call]
