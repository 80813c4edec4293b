"""The agent's side of an engine's CUDA memory.

Zeros cannot replace this memory: all copies must end before `close`.
"""

from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvbus.errors import ClosedError, SegmentError
from kvbus.memory.cuda import driver
from kvbus.memory.cuda.driver import check_cuda, gpu_ordinal
from kvbus.memory.mapping import OwnedMemory
from kvbus.planning import Runs

Offsets = npt.NDArray[np.int64]
T = TypeVar("T")

WORDS = {
    16: torch.complex128,  # 16 bytes, whose bits stay as they are
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


class CudaMapping(OwnedMemory):
    """An engine's CUDA memory, open in this process.

    Blocks for milliseconds, or seconds the first time: use a thread. Raises `SegmentError`.
    """

    def __init__(self, device: str, handle: bytes, *, offset_bytes: int, size_bytes: int) -> None:
        self._tensor: torch.Tensor | None = None
        self.device, self.size_bytes = device, size_bytes
        self.ordinal = gpu_ordinal(device)
        if len(handle) != driver.HANDLE_BYTES:
            raise SegmentError(
                f"a CUDA memory handle has {driver.HANDLE_BYTES} bytes, not {len(handle)}"
            )
        _make_context(self.ordinal)
        with driver.on_gpu(self.ordinal):
            self._base = driver.open_memory(handle)
        self.closed = False
        try:
            self._check_extent(self._base, offset_bytes)
            self._tensor = torch.as_tensor(
                _Extent(self._base + offset_bytes, size_bytes), device=f"cuda:{self.ordinal}"
            )
        except RuntimeError as error:
            self.close()
            raise SegmentError(
                f"{size_bytes} bytes from byte {offset_bytes} on were claimed of a CUDA "
                f"allocation, and torch cannot use them: {error}"
            ) from error
        except BaseException:
            self.close()
            raise

    def view(self) -> torch.Tensor:
        """Valid until `close`."""
        if self._tensor is None:
            raise ClosedError("the CUDA memory was closed: its engine is gone")
        return self._tensor

    def discard(self) -> None:
        """Do nothing: `close` follows once no copy runs."""

    def close(self) -> None:
        """Idempotent. No copy may run. May block: use a thread."""
        was_closed, self.closed, self._tensor = self.closed, True, None
        if not was_closed:
            with driver.on_gpu(self.ordinal):
                driver.close_memory(self._base)

    def _check_extent(self, base: int, offset_bytes: int) -> None:
        with driver.on_gpu(self.ordinal):
            allocation = driver.allocation_of(base)
        if allocation is not None and offset_bytes + self.size_bytes > allocation[1]:
            raise SegmentError(
                f"{self.size_bytes} bytes from byte {offset_bytes} on were claimed of a CUDA "
                f"allocation of {allocation[1]}",
                claimed_bytes=offset_bytes + self.size_bytes,
                actual_bytes=allocation[1],
            )


def _make_context(ordinal: int) -> None:
    try:
        torch.zeros(1, device=f"cuda:{ordinal}")
    except RuntimeError as error:
        raise SegmentError(f"GPU {ordinal} cannot be used: {error}") from error


class _Extent:
    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "strides": None,
            "data": (address, False),
        }


class GpuSlots:
    """Zeroed; ``pinned`` is on the host. Raises `SegmentError`."""

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
        if self._tensor is None:
            raise ClosedError("the staging memory was closed")
        return self._tensor

    @property
    def address(self) -> int:
        return self.view().data_ptr()

    def close(self) -> None:
        self._tensor = None


class CopyStream:
    """One copy runs at a time; thread-safe. Raises `SegmentError`."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._stream = torch.cuda.Stream(torch.device("cuda", ordinal))  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as error:
            raise SegmentError(f"GPU {ordinal} cannot be used: {error}") from error

    def run(self, copy: Callable[[], T]) -> T:
        """Run ``copy``, and block until its bytes are there."""
        with torch.cuda.stream(self._stream):
            try:
                return copy()
            finally:
                self._stream.synchronize()


def is_context_lost() -> bool:
    """Return whether all CUDA calls of this process fail from now on, as after a fault."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class GpuMover:
    """Runs are rows of the largest size that divides their offsets and length.

    So one `index_select` and one `index_copy_` move all runs between two allocations.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self.device = tensors, tensors[0].device

    def move(
        self,
        content: torch.Tensor | npt.NDArray[np.uint8],
        runs_at: Callable[[int], Runs],
        *,
        into_slot: bool,
    ) -> None:
        there = torch.from_numpy(content) if isinstance(content, np.ndarray) else content
        is_beside = there.device == self.device
        near = there if is_beside else torch.empty_like(there, device=self.device)
        at_once = is_beside or not there.is_pinned()  # otherwise `CopyStream.run` waits
        if not (into_slot or is_beside):
            near.copy_(there, non_blocking=not at_once)
        for addresses, run_bytes in runs_at(near.data_ptr()).by_length():
            found = _by_tensor(addresses, run_bytes, [*self._tensors, near])
            for (source, target), (origin, goal) in found:
                target.index_copy_(0, goal, source.index_select(0, origin))
        if into_slot and not is_beside:
            there.copy_(near, non_blocking=not at_once)

    def zero(self, runs: Runs) -> None:
        for addresses, run_bytes in runs.by_length():
            for (rows,), (numbers,) in _by_tensor(addresses[1:], run_bytes, self._tensors):
                rows.index_fill_(0, numbers, 0)


def _by_tensor(
    addresses: Offsets, run_bytes: int, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield rows of the tensors that runs ([side, run]) lie in, and row numbers, by side."""
    ordered = sorted(tensors, key=torch.Tensor.data_ptr)
    starts = np.array([tensor.data_ptr() for tensor in ordered])
    held = np.searchsorted(starts, addresses, side="right") - 1
    for which in np.unique(held, axis=1).T:
        is_there = (held == which[:, None]).all(axis=0)
        offsets = addresses[:, is_there] - starts[which][:, None]
        row_bytes = int(np.gcd.reduce(offsets, axis=None, initial=run_bytes))
        rows = _rows([ordered[at] for at in which], row_bytes)
        numbers = offsets[:, :, None] // row_bytes + np.arange(run_bytes // row_bytes)
        on_device = torch.from_numpy(numbers.reshape(len(which), -1)).to(rows[0].device)
        yield rows, list(on_device)


def _rows(tensors: Sequence[torch.Tensor], row_bytes: int) -> list[torch.Tensor]:
    starts = [at for one in tensors for at in (one.data_ptr(), int(one.storage_offset()))]
    word_bytes = gcd(max(WORDS), row_bytes, *starts)
    return [
        one[: one.numel() // row_bytes * row_bytes]
        .view(WORDS[word_bytes])
        .view(-1, row_bytes // word_bytes)
        for one in tensors
    ]
