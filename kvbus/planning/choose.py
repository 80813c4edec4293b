"""The choice of a fetch's path, and the learned duration of fetches."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvbus.errors import LocalError
from kvbus.geometry import EngineSpec
from kvbus.planning.mapping import Share, position_bytes


class Path(StrEnum):
    DIRECT = "direct"
    """READ from the prefill engine's blocks into the decode engine's."""
    STAGED = "staged"
    """READ whole blocks into a slot here, and copy out of it."""
    PACKED = "packed"
    """Gather into a slot in canonical order, READ the slot, scatter it."""
    MAPPED = "mapped"
    """Copy between blocks; the decode agent has mapped the prefill engine's."""


LONG_RUN_BYTES = 8 << 10
"""READing a run takes no longer than gathering and scattering this many bytes twice."""
SHORT_BYTES, FEW_RUNS = 1 << 20, 128
"""A fetch this small ends before a tile could have been requested."""
LEAST_TILE_BYTES = 1 << 20
WEIGHT, MAX_RATIO = 0.2, 100.0


# Mapped memory is copied once, by one core; each other path moves the bytes at least as often. A
# READ takes time for each run. Copying a run out of a slot here takes a thirtieth of that, but each
# byte is copied once more. In return, bytes that several ranks hold are read once. With slots on
# both sides, each byte is copied twice more.
def choose_path(
    paths: Collection[Path],
    *,
    num_bytes: int,
    num_runs: int,
    repeated_bytes: int,
    num_staged_runs: int,
) -> Path:
    """Return the first possible path in this order; raises `LocalError` without any.

    mapped
    direct   if runs are long and no bytes repeat across ranks, or if the fetch is very small
    staged   if runs into slots are long
    packed, staged, direct
    """
    is_long = has_long_runs(num_bytes, num_runs) and not repeated_bytes
    staged_is_long = has_long_runs(num_bytes - repeated_bytes, num_staged_runs)
    order = [Path.STAGED, Path.PACKED] if staged_is_long else [Path.PACKED, Path.STAGED]
    order.insert(0 if is_long or is_little(num_bytes, num_runs) else 2, Path.DIRECT)
    for path in (Path.MAPPED, *order):
        if path in paths:
            return path
    raise LocalError("the fetch can take none of the paths")


def has_long_runs(num_bytes: int, num_runs: int) -> bool:
    return num_bytes >= num_runs * LONG_RUN_BYTES


def is_little(num_bytes: int, num_runs: int) -> bool:
    return num_bytes <= SHORT_BYTES and num_runs <= FEW_RUNS


def usual_tile_bytes(num_bytes: int, *, least: int, slot_bytes: int) -> int:
    """Return the size of a fetch's tiles: at least two, as their stages overlap."""
    return min(slot_bytes, max(LEAST_TILE_BYTES, num_bytes // 2, least))


def least_tile_bytes(shares: Iterable[Share], engine: EngineSpec) -> int:
    sizes = (position_bytes(one, engine.group(one.group)) // len(one.layers) for one in shares)
    return max(sizes, default=1)


# A fetch takes fixed_s + num_bytes / bytes_per_s. The ratio of its duration to the prediction
# corrects both terms: the larger one with the full weight, the smaller one with less. So short
# fetches teach the fixed time, and long ones the rate. The weights make a mean at first, and later
# an exponential average. Contention with other fetches is included in the duration.
@dataclass(slots=True)
class Learned:
    fixed_s: float = 1e-3
    bytes_per_s: float = 8e9
    num_observed: int = 0

    def predict_s(self, num_bytes: int) -> float:
        return self.fixed_s + num_bytes / self.bytes_per_s

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= 0 or seconds <= 0:
            return
        predicted_s = self.predict_s(num_bytes)
        ratio = min(max(seconds / predicted_s, 1 / MAX_RATIO), MAX_RATIO)
        weight = max(WEIGHT, 1 / (self.num_observed + 1))
        fixed_part = self.fixed_s / predicted_s
        rate_part = 1 - fixed_part
        larger_part = max(fixed_part, rate_part)
        self.fixed_s *= ratio ** (weight * fixed_part / larger_part)
        self.bytes_per_s /= ratio ** (weight * rate_part / larger_part)
        self.num_observed += 1
