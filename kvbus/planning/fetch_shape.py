"""What one fetch is on each path: bytes, descriptors, runs.

Refuses to say how long any of it takes: that is `cost`.
"""

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


ALL_PATHS: tuple[Path, ...] = tuple(Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectWork:
    """What a fetch is on the direct path; how its READs spread over peers does not matter.

    Raises `LocalError` for less than nothing, as the other two do.
    """

    num_bytes: int
    num_descriptors: int

    def __post_init__(self) -> None:
        _check(num_bytes=self.num_bytes, num_descriptors=self.num_descriptors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWork:
    """What a fetch is on the packed path.

    The runs are mean lengths in bytes, at the prefill engine's side and the decode engine's. A
    box never spans two shares.
    """

    num_bytes: int
    gather_run_bytes: float
    scatter_run_bytes: float
    num_shares: int = 1

    def __post_init__(self) -> None:
        _check(num_bytes=self.num_bytes)
        _check(1, num_shares=self.num_shares)
        _check(1, gather_run_bytes=self.gather_run_bytes, scatter_run_bytes=self.scatter_run_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderedWork:
    """What a fetch is when it is packed in the reader's order: descriptors go from slot to block.

    ``num_bytes`` are those of the slots, parts of blocks that nobody asked for included.
    """

    num_bytes: int
    gather_run_bytes: float
    num_descriptors: int
    num_shares: int = 1

    def __post_init__(self) -> None:
        _check(num_bytes=self.num_bytes, num_descriptors=self.num_descriptors)
        _check(1, num_shares=self.num_shares, gather_run_bytes=self.gather_run_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchShape:
    """What one fetch is on each path; None for a path that it cannot take."""

    direct: DirectWork | None = None
    packed: PackedWork | None = None
    reordered: ReorderedWork | None = None

    def work(self, path: Path) -> DirectWork | PackedWork | ReorderedWork | None:
        """What it is on one path."""
        match path:
            case Path.DIRECT:
                return self.direct
            case Path.PACKED:
                return self.packed
            case Path.REORDERED:
                return self.reordered


def _check(least: int = 0, **values: float) -> None:
    for name, value in values.items():
        if not value >= least:  # written so that NaN is refused, too
            raise LocalError(f"{name} is {value}: it is at least {least}", field=name)
