"""Copies runs within the memory of one GPU, and zeroes them, by torch.

Runs are rows of the widest size that divides all of their addresses and their length, so one
`index_select` and one `index_copy_` move all runs between two allocations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from kvbus.planning import Copies

Offsets = npt.NDArray[np.int64]
WORDS = {
    16: torch.complex128,  # moved as 16 bytes at once, its bits as they are
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


class GpuMover:
    """Copies between ``tensors``, the segments of a rank on one device, and slots.

    A slot on another device is copied in one piece, from or into one beside the rank.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self.device = tensors, tensors[0].device

    def move(
        self,
        content: torch.Tensor | npt.NDArray[np.uint8],
        copies_at: Callable[[int], list[Copies]],
        *,
        into_slot: bool,
    ) -> None:
        """Copy between the rank and ``content``, all bytes of a box in its slot."""
        there = torch.from_numpy(content) if isinstance(content, np.ndarray) else content
        is_beside = there.device == self.device
        near = there if is_beside else torch.empty_like(there, device=self.device)
        at_once = is_beside or not there.is_pinned()  # else the copy stream is waited for
        if not (into_slot or is_beside):
            near.copy_(there, non_blocking=not at_once)
        _copy(copies_at(near.data_ptr()), [*self._tensors, near])
        if into_slot and not is_beside:
            there.copy_(near, non_blocking=not at_once)

    def zero(self, copies: Iterable[Copies]) -> None:
        """Write zeros over the targets."""
        for one in copies:
            for runs in _by_tensor(one.addresses()[1:], one.run_bytes, self._tensors):
                (rows,), (numbers,) = runs
                rows.index_fill_(0, numbers, 0)


def _copy(copies: Iterable[Copies], tensors: Sequence[torch.Tensor]) -> None:
    for one in copies:
        for (source, target), (origin, goal) in _by_tensor(one.addresses(), one.run_bytes, tensors):
            target.index_copy_(0, goal, source.index_select(0, origin))


def _by_tensor(
    addresses: Offsets, run_bytes: int, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The tensors that runs lie in, as rows, and the numbers of their rows: of each side.

    ``addresses`` have the shape [side, run].
    """
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
    """All whole rows of each tensor, in the widest words that all are aligned to."""
    starts = [at for one in tensors for at in (one.data_ptr(), int(one.storage_offset()))]
    word_bytes = gcd(max(WORDS), row_bytes, *starts)
    return [
        one[: one.numel() // row_bytes * row_bytes]
        .view(WORDS[word_bytes])
        .view(-1, row_bytes // word_bytes)
        for one in tensors
    ]
