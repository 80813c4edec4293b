"""Digests of pieces of this process's memory: XXH3 of 64 bits, from the package `xxhash`.

Where kvbus's kernel in C was built, that walks through the memory and calls the package's own
function, without the GIL; else numpy does. Refuses nothing: addresses are the caller's to check.
"""

import ctypes
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from kvbus.geometry import AxisName, BlockTable, Box, SlotOrder, slot_bytes, slot_table
from kvbus.memory.copying import PagedMemory, Slot, address_of, gather
from kvbus.memory.run_copy import KERNEL
from kvbus.planning import PlacedRank, slot_rank
from kvbus.planning.digests import SPAN_TOKENS, Lattice, Numbers, PieceMap

Digests = npt.NDArray[np.uint64]
Kernel = Callable[..., None]
HASHES = ("XXH3_64bits_dispatch", "XXH3_64bits")
"""The package's functions in C, the one that looks at the CPU first."""
PROBE = bytes(range(256)) * 16
BY_PIECE = SlotOrder(
    (AxisName.LAYER, AxisName.KV, AxisName.HEAD, AxisName.BLOCK, AxisName.TOKEN, AxisName.DIM), 1
)
"""Each piece in one run."""


def load_kernel(library: Path, package: Path | None = None) -> tuple[Kernel, int] | None:
    """The kernel, and the address of the hash that it calls; None where one is missing.

    ``package`` is what `xxhash` itself has in C, by default the one that is installed.
    """
    try:
        kernel: Any = ctypes.CDLL(str(library)).kvbus_digest_pieces
        hash_in_c = _hash_in_c(package or _package())
    except (OSError, AttributeError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = (
        *(pointer, pointer, number, pointer, pointer),
        *(pointer, number, number, number, number, pointer, pointer),
    )
    kernel.restype = None
    address = ctypes.cast(hash_in_c, pointer).value
    found: Kernel = kernel
    return None if address is None else (found, address)


def _package() -> Path:
    spec = find_spec("xxhash._xxhash")
    return Path(spec.origin if spec is not None and spec.origin else "")


def _hash_in_c(package: Path) -> Any:
    """Raises `AttributeError` when the package has none that digests as it says."""
    library = ctypes.CDLL(str(package))
    for name in HASHES:
        function: Any = getattr(library, name, None)
        if function is None:
            continue
        function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
        if function(PROBE, len(PROBE)) == xxhash.xxh3_64_intdigest(PROBE):
            return function
    raise AttributeError(f"{package} has no {HASHES[-1]}")


_kernel = load_kernel(KERNEL)


def is_compiled() -> bool:
    """Whether digests are made by the kernel in C."""
    return _kernel is not None


def digest_pieces(lattice: Lattice, pieces: Numbers) -> Digests:
    """The digest of each of ``pieces``, which are span * number of the lattice's corners + corner.

    All memory must be mapped and stay so. In this thread; the kernel releases the GIL.
    """
    if _kernel is None:
        return digest_by_numpy(lattice, pieces)
    return digest_by_kernel(*_kernel, lattice, pieces)


def digest_by_kernel(kernel: Kernel, hash_at: int, lattice: Lattice, pieces: Numbers) -> Digests:
    """One call into C."""
    longest = int(np.diff(lattice.edges).max()) * lattice.row_bytes
    buffer, found = np.empty(longest, np.uint8), np.empty(pieces.size, np.uint64)
    corners, positions, edges, wanted = map(
        np.ascontiguousarray, (lattice.corners, lattice.positions, lattice.edges, pieces)
    )
    kernel(
        hash_at,
        corners.ctypes.data,
        corners.size,
        positions.ctypes.data,
        edges.ctypes.data,
        wanted.ctypes.data,
        wanted.size,
        lattice.num_runs,
        lattice.run_bytes,
        lattice.step_bytes,
        buffer.ctypes.data,
        found.ctypes.data,
    )
    return found


def digest_by_numpy(lattice: Lattice, pieces: Numbers) -> Digests:
    """The same without a compiler, run by run."""
    steps = range(0, lattice.num_runs * lattice.step_bytes or 1, lattice.step_bytes or 1)
    num_corners = lattice.corners.size
    found = np.empty(pieces.size, np.uint64)
    for at, number in enumerate(pieces.tolist()):
        span, corner = divmod(number, num_corners)
        first, stop = lattice.edges[span : span + 2].tolist()
        rows = (lattice.positions[first:stop] + lattice.corners[corner]).tolist()
        piece = b"".join(
            ctypes.string_at(row + step, lattice.run_bytes) for row in rows for step in steps
        )
        found[at] = xxhash.xxh3_64_intdigest(piece)
    return found


def digest_gathered(
    memory: PagedMemory, table: BlockTable, box: Box, pieces: Numbers, *, buffer_bytes: int
) -> Digests:
    """The digests of ``pieces`` of ``box``, of memory that this process cannot look into.

    It is gathered into a buffer of about ``buffer_bytes``, part by part. Raises `GeometryError` as
    `gather` does.
    """
    found = np.empty(pieces.size, np.uint64)
    num_corners = len(box.layers) * len(box.parts) * box.num_heads
    first_span = box.start // SPAN_TOKENS
    for part in _parts(memory, box, buffer_bytes):
        skipped = (part.start // SPAN_TOKENS - first_span) * num_corners
        end = (-(-part.stop // SPAN_TOKENS) - first_span) * num_corners
        low, high = np.searchsorted(pieces, (skipped, end))
        buffer = np.empty(slot_bytes(memory.group, part, BY_PIECE), np.uint8)
        gather(memory, table, part, Slot(buffer, BY_PIECE))
        slot = slot_rank(memory.placed, part, BY_PIECE)
        at = dict.fromkeys(slot.addresses, address_of(buffer))
        lattices = PieceMap(PlacedRank(slot.engine, slot.rank, at)).lattices
        (lattice,) = lattices(part, slot_table(part, BY_PIECE))
        found[low:high] = digest_pieces(lattice, pieces[low:high] - skipped)
    return found


def _parts(memory: PagedMemory, box: Box, buffer_bytes: int) -> Iterator[Box]:
    """The box, cut between spans."""
    one_span = replace(box, start=0, stop=SPAN_TOKENS)
    num_spans = max(1, buffer_bytes // slot_bytes(memory.group, one_span, BY_PIECE))
    first, step = box.start // SPAN_TOKENS * SPAN_TOKENS, num_spans * SPAN_TOKENS
    for at in range(first, box.stop, step):
        yield replace(box, start=max(box.start, at), stop=min(box.stop, at + step))
