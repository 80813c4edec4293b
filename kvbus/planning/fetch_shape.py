"""What one fetch is on each path: bytes, descriptors, runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvbus.errors import LocalError


class Path(StrEnum):
    """How the bytes of a fetch go from blocks to blocks."""

    DIRECT = "direct"
    """READ straight from the prefill engine's blocks into the decode engine's."""
    PACKED = "packed"
    """Gather into a slot in the canonical order, READ the slot, scatter it."""
    REORDERED = "reordered"
    """Gather into a slot in the reader's order, READ from the slot into its blocks."""
    MAPPED = "mapped"
    """Copy from blocks to blocks: the decode agent has mapped the prefill engine's."""


ALL_PATHS: tuple[Path, ...] = tuple(Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWork:
    """What a fetch is on one path; None stands for a stage that the path does not have.

    ``num_bytes`` go through the READ, parts of blocks that nobody asked for included, or through
    the one copy of the mapped path, in ``num_copied_runs``. Runs are mean lengths in bytes. Without
    ``num_descriptors`` a box is one. With a gather the fetch goes in boxes, none of which spans two
    shares. A byte is scattered ``num_copies`` times on average, once for each rank that it is read
    for. Raises `LocalError` for less than nothing.
    """

    num_bytes: int
    num_descriptors: int | None = None
    gather_run_bytes: float | None = None
    scatter_run_bytes: float | None = None
    num_shares: int = 1
    num_copies: float = 1.0
    num_copied_runs: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            least = 0 if name in ("num_bytes", "num_descriptors", "num_copied_runs") else 1
            if value is not None and not value >= least:  # so NaN is refused, too
                raise LocalError(f"{name} is {value}: it is at least {least}", field=name)


FetchShape = Mapping[Path, PathWork]
"""The paths that a fetch can take, and what it is on each."""
