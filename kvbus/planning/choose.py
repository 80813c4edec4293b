"""The rule that picks the path of a fetch, and what a fetch takes: two numbers that are learned."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvbus.errors import LocalError
from kvbus.geometry import EngineSpec
from kvbus.planning.mapping import Share, position_bytes


class Path(StrEnum):
    """How the bytes of a fetch go from blocks to blocks."""

    DIRECT = "direct"
    """READ straight from the prefill engine's blocks into the decode engine's."""
    STAGED = "staged"
    """READ whole blocks of the prefill engine into a slot here, and copy out of it."""
    PACKED = "packed"
    """Gather into a slot in the canonical order, READ the slot, scatter it."""
    MAPPED = "mapped"
    """Copy from blocks to blocks: the decode agent has mapped the prefill engine's."""


LONG_RUN_BYTES = 8 << 10
"""The READ of a run takes no longer than to gather and scatter so many bytes, twice over."""
SHORT_BYTES, FEW_RUNS = 1 << 20, 128
"""So little is read before a box could have been asked for."""
LEAST_BOX_BYTES = 1 << 20
WEIGHT, MAX_RATIO = 0.2, 100.0


# Mapped memory is copied once, by one core: each other path moves the bytes as often or more. A
# READ takes time for each run. Out of a slot here a run costs a thirtieth of that, but each byte is
# copied once more, and is read once for all ranks that hold the same; through slots on both sides
# it is copied twice more.
def choose_path(
    paths: Collection[Path],
    *,
    num_bytes: int,
    num_runs: int,
    repeated_bytes: int,
    num_staged_runs: int,
) -> Path:
    """The path of a fetch that can take ``paths``: the mapped one, if it is open.

    Else the direct one, if its ``num_runs`` are long and nothing is read for several ranks
    (``repeated_bytes``), or all that is very little; else through slots here alone, if runs into
    them are long; else through slots on both sides. Raises `LocalError` when there are none.
    """
    is_little = num_bytes <= SHORT_BYTES and num_runs <= FEW_RUNS
    is_long = num_bytes >= num_runs * LONG_RUN_BYTES and not repeated_bytes
    staged_is_long = num_bytes - repeated_bytes >= num_staged_runs * LONG_RUN_BYTES
    order = [Path.STAGED, Path.PACKED] if staged_is_long else [Path.PACKED, Path.STAGED]
    order.insert(0 if is_little or is_long else 2, Path.DIRECT)
    for path in (Path.MAPPED, *order):
        if path in paths:
            return path
    raise LocalError("the fetch can take none of the paths")


def usual_box_bytes(num_bytes: int, *, least: int, slot_bytes: int) -> int:
    """How large the boxes of a fetch are to be: two at least, as their stages overlap.

    None can be under ``least``, see `least_box_bytes`.
    """
    return min(slot_bytes, max(LEAST_BOX_BYTES, num_bytes // 2, least))


def least_box_bytes(shares: Iterable[Share], engine: EngineSpec) -> int:
    """The smallest box that `cut_into_boxes` can make of each of ``shares``; 1 without any."""
    sizes = (position_bytes(one, engine.group(one.group)) // len(one.layers) for one in shares)
    return max(sizes, default=1)


# A fetch takes fixed_s + num_bytes / bytes_per_s. By how much one took longer than that corrects
# both, each by its part of the time: short fetches teach the fixed time, long ones the rate. What
# others take from it meanwhile is in what it takes.
@dataclass(slots=True)
class Learned:
    """What fetches from one prefill agent by one path take; the defaults are assumed."""

    fixed_s: float = 1e-3
    bytes_per_s: float = 8e9
    num_observed: int = 0

    def predict_s(self, num_bytes: int) -> float:
        """What one would take."""
        return self.fixed_s + num_bytes / self.bytes_per_s

    def observe(self, num_bytes: int, seconds: float) -> None:
        """One took so long; of nothing, or in no time, says nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return
        predicted_s = self.predict_s(num_bytes)
        ratio = min(max(seconds / predicted_s, 1 / MAX_RATIO), MAX_RATIO)
        weight = max(WEIGHT, 1 / (self.num_observed + 1))
        fixed, moving = self.fixed_s / predicted_s, 1 - self.fixed_s / predicted_s
        self.fixed_s *= ratio ** (weight * fixed / max(fixed, moving))
        self.bytes_per_s /= ratio ** (weight * moving / max(fixed, moving))
        self.num_observed += 1
