"""Copies of byte runs, in C, or in numpy without a compiler. Callers check all addresses."""

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
"""Larger single runs go to the C kernel, which bypasses the caches. A call costs 5 µs."""
MAX_ARRAY_BYTES = int(np.iinfo(np.intp).max)
"""A view from heap to mapping exceeds it for runs of 64 KiB."""
_AT = np.zeros((2, 1), np.int64)


def load_kernel(library: Path) -> Kernel | None:
    try:
        kernel: Any = ctypes.CDLL(str(library)).kvbus_copy_runs
    except (OSError, AttributeError):
        return None
    array = (ctypes.c_void_p, ctypes.c_int64)
    kernel.argtypes, kernel.restype = (*array, *array, *array, ctypes.c_int64), None
    found: Kernel = kernel
    return found


def _load_swap() -> Any:
    """Keep the GIL in swaps: releasing it takes longer than a swap."""
    try:
        swap: Any = ctypes.PyDLL(str(KERNEL)).kvbus_swap_word
    except (OSError, AttributeError):
        return None
    swap.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64
    swap.restype = ctypes.c_uint64
    return swap


_kernel, swap_word = load_kernel(KERNEL), _load_swap()


def is_compiled() -> bool:
    return _kernel is not None


def copy_runs(runs: Runs) -> None:
    """Copy without the GIL. Sources and targets must not overlap."""
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
    for target, _, num_bytes in runs:
        ctypes.memset(target, 0, num_bytes)


def copy_by_kernel(kernel: Kernel, lattice: Lattice) -> None:
    axes = [*map(np.ascontiguousarray, (lattice.outer, lattice.units, lattice.inner))]
    arguments = [number for axis in axes for number in (axis.ctypes.data, axis.shape[1])]
    kernel(*arguments, lattice.run_bytes)


def copy_by_numpy(lattice: Lattice) -> None:
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
    def __init__(self, first_address: int, num_addresses: int, run_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_addresses, run_bytes),
            "strides": (1, 1),  # runs overlap
            "data": (first_address, False),
        }


def _runs_from(addresses: Numbers, run_bytes: int) -> tuple[Bytes, Numbers]:
    first, last = int(addresses.min()), int(addresses.max())
    return np.asarray(_Runs(first, last - first + 1, run_bytes)), addresses - first
