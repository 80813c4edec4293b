"""Copies runs of bytes within this process: by the kernel in C, or by numpy where it is not built.

Refuses nothing: addresses are the caller's to check (`kvbus.planning.check_sources`).
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbus.planning import Copies, Run
from kvbus.planning.pairs import Offsets

Bytes = npt.NDArray[np.uint8]
Kernel = Callable[..., None]
KERNEL = Path(__file__).with_name("copy_runs.so")


def load_kernel(library: Path) -> Kernel | None:
    """The kernel in C; None where there is none for this machine."""
    try:
        kernel: Any = ctypes.CDLL(str(library)).kvbus_copy_runs
    except (OSError, AttributeError):
        return None
    array = (ctypes.c_void_p, ctypes.c_int64)
    kernel.argtypes, kernel.restype = (*array, *array, *array, ctypes.c_int64), None
    found: Kernel = kernel
    return found


_kernel = load_kernel(KERNEL)


def is_compiled() -> bool:
    """Whether copies are made by the kernel in C."""
    return _kernel is not None


def copy_runs(job: Iterable[Copies]) -> None:
    """Copy, in this thread; the GIL is released while bytes move.

    All memory must be mapped and stay so. Sources and targets must not overlap.
    """
    for copies in job:
        if _kernel is None:
            copy_by_numpy(copies)
        else:
            copy_by_kernel(_kernel, copies)


def copy_few_runs(runs: Iterable[Run]) -> None:
    """As `copy_runs`: a call for each run, and no arrays."""
    for target, source, num_bytes in runs:
        ctypes.memmove(target, source, num_bytes)


def copy_by_kernel(kernel: Kernel, copies: Copies) -> None:
    """One call into C."""
    outer, units, inner = map(np.ascontiguousarray, (copies.outer, copies.units, copies.inner))
    kernel(
        outer.ctypes.data,
        outer.shape[1],
        units.ctypes.data,
        units.shape[1],
        inner.ctypes.data,
        inner.shape[1],
        copies.run_bytes,
    )


def copy_by_numpy(copies: Copies) -> None:
    """The same without a compiler: an assignment for each outer offset and unit."""
    axes, rest = even_axes(copies.inner)
    starts = replace(copies, inner=rest).addresses()
    for source, target in starts.T.tolist():
        if not axes:
            ctypes.memmove(target, source, copies.run_bytes)
            continue
        _view(target, axes, 1, copies.run_bytes)[...] = _view(source, axes, 0, copies.run_bytes)


class EvenAxis(NamedTuple):
    """So many offsets, each as far from the one before: in the source and in the target."""

    size: int
    steps: tuple[int, int]


def even_axes(offsets: Offsets) -> tuple[list[EvenAxis], Offsets]:
    """Axes, outermost first, and what is left: the offsets are all sums of one of each."""
    axes: list[EvenAxis] = []
    while offsets.shape[1] > 1:
        first, step = offsets[:, :1], offsets[:, 1] - offsets[:, 0]
        even = first + step[:, None] * np.arange(offsets.shape[1])
        uneven = np.flatnonzero((offsets != even).any(axis=0))
        size = int(uneven[0]) if uneven.size else offsets.shape[1]
        if offsets.shape[1] % size:
            break
        table = offsets.reshape(2, -1, size)
        if (table - table[:, :, :1] != table[:, :1] - table[:, :1, :1]).any():
            break
        axes.insert(0, EvenAxis(size, (int(step[0]), int(step[1]))))
        offsets = table[:, :, 0]
    return axes, offsets


def _view(address: int, axes: Iterable[EvenAxis], side: int, run_bytes: int) -> Bytes:
    """The runs at ``address`` and on from there, the last axis one run."""
    reaches = [axis.steps[side] * (axis.size - 1) for axis in axes]
    below = sum(reach for reach in reaches if reach < 0)
    above = sum(reach for reach in reaches if reach > 0) + run_bytes
    buffer: Any = (ctypes.c_char * (above - below)).from_address(address + below)
    shape, strides = [axis.size for axis in axes], [axis.steps[side] for axis in axes]
    return np.ndarray((*shape, run_bytes), np.uint8, buffer, -below, (*strides, 1))
