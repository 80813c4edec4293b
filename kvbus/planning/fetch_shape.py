"""What one fetch is on each path: bytes, descriptors, runs; and which path it takes."""

from collections.abc import Collection, Mapping
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
    """What a fetch is on one path.

    ``num_bytes`` go through the READ, parts of blocks that nobody asked for included, or through
    the one copy of the mapped path. ``num_runs`` are descriptors of the READ, or stretches of that
    copy; 0 where a box is one. Through slots it goes in boxes, none of which spans two shares.
    """

    num_bytes: int
    num_runs: int = 0
    num_shares: int = 1


FetchShape = Mapping[Path, PathWork]
"""The paths that a fetch can take, and what it is on each."""

LONG_RUN_BYTES = 8 << 10
"""The READ of a run takes no longer than to gather and scatter so many bytes, twice over."""
SHORT_BYTES, FEW_RUNS = 1 << 20, 128
"""So little is read before a box could have been asked for."""
LEAST_BOX_BYTES = 1 << 20


# Mapped memory is copied once, by one core: each other path moves the bytes as often or more. A
# READ takes time for each run. Through slots a run costs a thirtieth of that, but each byte is
# copied twice more, and is read once for all ranks that hold the same.
def choose_path(
    paths: Collection[Path], *, num_bytes: int, num_runs: int, repeated_bytes: int
) -> Path:
    """The path of a fetch that can take ``paths``: the mapped one, if it is open.

    Else the direct one, if its ``num_runs`` are long and nothing is read for several ranks
    (``repeated_bytes``), or all that is very little; else through slots. Raises `LocalError` when
    there are none.
    """
    is_little = num_bytes <= SHORT_BYTES and num_runs <= FEW_RUNS
    is_long = num_bytes >= num_runs * LONG_RUN_BYTES and not repeated_bytes
    slots = (Path.PACKED, Path.REORDERED)
    order = (Path.DIRECT, *slots) if is_little or is_long else (*slots, Path.DIRECT)
    for path in (Path.MAPPED, *order):
        if path in paths:
            return path
    raise LocalError("the fetch can take none of the paths")


def usual_box_bytes(num_bytes: int, *, slot_bytes: int) -> int:
    """How large the boxes of a fetch are to be: two at least, as their stages overlap."""
    return min(slot_bytes, max(LEAST_BOX_BYTES, num_bytes // 2))
