"""Copies runs of bytes within this process: by the kernel in C, or by numpy where it is not built.

Addresses are the caller's to check (`kvbus.planning.Runs.check_sources`).
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbus.planning import Lattice, Runs

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Kernel = Callable[..., None]
KERNEL = Path(__file__).with_name("copy_runs.so")
STREAMED_BYTES = 1 << 20
"""A single run of so many bytes or more is copied by the kernel, which stores past the caches. A
smaller one is copied by libc: a call of the kernel takes 5 µs, longer than what it saves.
"""
MAX_ARRAY_BYTES = int(np.iinfo(np.intp).max)
"""numpy makes no larger array. Runs of 64 KiB and more exceed it between the heap and a mapping."""
_AT = np.zeros((2, 1), np.int64)


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


def _load_swap() -> Any:
    """As `load_kernel`; without the pause of the GIL, which takes longer than a swap."""
    try:
        swap: Any = ctypes.PyDLL(str(KERNEL)).kvbus_swap_word
    except (OSError, AttributeError):
        return None
    swap.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
    swap.restype = ctypes.c_uint64
    return swap


_kernel, swap_word = load_kernel(KERNEL), _load_swap()


def is_compiled() -> bool:
    """Whether copies are made by the kernel in C."""
    return _kernel is not None


def copy_runs(runs: Runs) -> None:
    """Copy, in this thread; the GIL is released while bytes move.

    All memory must be mapped and stay so. Sources and targets must not overlap.
    """
    for target, source, num_bytes in runs.few:
        if num_bytes < STREAMED_BYTES or _kernel is None:
            ctypes.memmove(target, source, num_bytes)
        else:
            copy_by_kernel(_kernel, Lattice(np.array([[source], [target]]), _AT, _AT, num_bytes))
    for lattice in runs.lattices:
        if _kernel is None:
            copy_by_numpy(lattice)
        else:
            copy_by_kernel(_kernel, lattice)


def zero_runs(runs: Runs) -> None:
    """Write zeros over the targets."""
    for target, _, num_bytes in runs:
        ctypes.memset(target, 0, num_bytes)


def copy_by_kernel(kernel: Kernel, lattice: Lattice) -> None:
    """One call into C."""
    axes = [*map(np.ascontiguousarray, (lattice.outer, lattice.units, lattice.inner))]
    arguments = [number for axis in axes for number in (axis.ctypes.data, axis.shape[1])]
    kernel(*arguments, lattice.run_bytes)


def copy_by_numpy(lattice: Lattice) -> None:
    """The same without a compiler: all runs are brought together, and then put in their places."""
    if not lattice.num_runs:
        return
    addresses, run_bytes = lattice.addresses(), lattice.run_bytes
    if (int(np.ptp(addresses, axis=1).max()) + 1) * run_bytes > MAX_ARRAY_BYTES:
        for source, target in addresses.T.tolist():
            ctypes.memmove(target, source, run_bytes)
        return
    (from_runs, sources), (to_runs, targets) = (_runs_from(side, run_bytes) for side in addresses)
    to_runs[targets] = from_runs[sources]


class _Runs:
    """What numpy reads to see a run of so many bytes at every address from ``first`` on."""

    def __init__(self, first: int, num_addresses: int, run_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_addresses, run_bytes),
            "strides": (1, 1),
            "data": (first, False),
        }


def _runs_from(addresses: Numbers, run_bytes: int) -> tuple[Bytes, Numbers]:
    """Runs by their distance from the first, [distance, byte]; and the distances."""
    first, last = int(addresses.min()), int(addresses.max())
    return np.asarray(_Runs(first, last - first + 1, run_bytes)), addresses - first
