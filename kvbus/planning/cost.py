"""What a fetch would take on each path, in seconds, and the choice of path and box size.

Rates come from `kvbus.agent.process.calibration`, corrections from `PeerRates`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import ceil, isfinite

from kvbus.errors import LocalError
from kvbus.planning.fetch_shape import ALL_PATHS, FetchShape, Path, PathWork

SMALLEST_BOX_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one pair of agents is; the defaults are those of the development machine.

    That had 2 cores, shared memory between the agents, and NIXL 1.5.1. Gathers are the prefill
    machine's. Raises `LocalError` for a rate that is not above 0; a run or a request may be free.
    """

    seconds_per_descriptor: float = 2.1e-6
    """Of a READ, on top of its bytes: the same for long ones and short ones."""
    wire_bytes_per_s: float = 8.5e9
    seconds_per_read: float = 120e-6
    """From the start of a READ of one byte to its end, as the caller sees it."""
    seconds_per_request: float = 250e-6
    """A box's `pack` request: the round trip and the way to a worker thread, nothing gathered."""
    gather_bytes_per_s: float = 14e9
    seconds_per_gathered_run: float = 65e-9
    """A run is what is contiguous in the engine's memory and in the slot."""
    scatter_bytes_per_s: float = 6.5e9
    seconds_per_scattered_run: float = 65e-9
    copy_bytes_per_s: float = 12e9
    """From blocks into blocks, on one core."""
    seconds_per_copied_run: float = 60e-9
    seconds_per_copy: float = 100e-6
    """From the start of a copy of one byte to its end, as the caller sees it; a scatter is one."""
    num_cores: int = 2
    """Cores that the stages of a fetch share, on the machine of the two that has fewer."""
    slots_in_flight: int = 3
    """Boxes of one fetch that may be between the start of their gather and the end of their
    scatter."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value, may_be_free = getattr(self, name), name.startswith("seconds_per_")
            if not isfinite(value) or value < 0 or (value == 0 and not may_be_free):
                raise LocalError(f"{name} is {value}: a rate is finite and above 0", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds that gather, READ, scatter and copy take, of one box or of a whole fetch."""

    gather_s: float = 0.0
    read_s: float = 0.0
    scatter_s: float = 0.0
    copy_s: float = 0.0

    @property
    def sum_s(self) -> float:
        """One after the other."""
        return self.gather_s + self.read_s + self.scatter_s + self.copy_s

    @property
    def longest_s(self) -> float:
        """The stage that sets the pace when there are cores for all."""
        return max(self.gather_s, self.read_s, self.scatter_s, self.copy_s)

    def times(self, factor: float) -> "Stages":
        """So many of them."""
        return Stages(
            gather_s=self.gather_s * factor,
            read_s=self.read_s * factor,
            scatter_s=self.scatter_s * factor,
            copy_s=self.copy_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a fetch would take on one path.

    ``seconds`` is corrected by ``correction``, ``stages`` are not: they are the seconds that each
    stage is busy. The direct and the mapped path have no boxes.
    """

    path: Path
    seconds: float
    stages: Stages
    correction: float = 1.0
    box_bytes: int | None = None
    num_boxes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The path that is predicted to be fastest, its box size, and what was predicted of each."""

    path: Path
    box_bytes: int | None
    predictions: tuple[Prediction, ...]


# The first box goes through its stages alone; each further one adds the pace:
#
#     gather  [box 1][box 2][box 3]
#     READ           [   box 1   ][   box 2   ][   box 3   ]
#     scatter                     [box 1]      [box 2]      [box 3]
#             |<- sum of stages of one box ->|<---  pace --->|...
#
#     seconds = sum of stages + (boxes - 1) * pace
#     pace    = max(longest stage, sum of stages / lanes)
#     lanes   = min(cores, slots in flight)
#
# So no stage is faster than itself, and no more stages run at once than there are cores and slots:
# with one lane nothing overlaps, with three the longest stage hides the others. A stage that a path
# lacks takes no time, and the direct path is one box of everything that only has a READ, the mapped
# path one that only has a copy. The round trip of a request is a part of its gather. Boxes are
# counted in fractions, so that a byte more never makes a fetch cheaper.
def predict(
    shape: FetchShape, path: Path, rates: Rates, *, slot_bytes: int, correction: float = 1.0
) -> Prediction:
    """Seconds of a fetch on one path, with the box size that is best for it.

    Raises `LocalError` when the fetch has no such path.
    """
    work = shape.get(path)
    if work is None:
        raise LocalError(f"the fetch cannot take the path '{path.value}'", path=path.value)
    sizes = (None,) if work.gather_run_bytes is None else box_sizes(slot_bytes)
    found = [_predict(path, work, rates, box_bytes=size, correction=correction) for size in sizes]
    return min(reversed(found), key=lambda prediction: prediction.seconds)


def choose(
    shape: FetchShape,
    rates: Rates,
    *,
    slot_bytes: int,
    corrections: Mapping[Path, float] | None = None,
    paths: Collection[Path] = ALL_PATHS,
) -> Choice:
    """The fastest of ``paths`` that the fetch can take; direct when two are equal.

    Raises `LocalError` when there is none.
    """
    corrections = corrections or {}
    predictions = tuple(
        predict(shape, path, rates, slot_bytes=slot_bytes, correction=corrections.get(path, 1.0))
        for path in ALL_PATHS
        if path in paths and path in shape
    )
    if not predictions:
        raise LocalError("the fetch can take none of the paths", paths=", ".join(sorted(paths)))
    best = min(predictions, key=lambda prediction: prediction.seconds)
    return Choice(path=best.path, box_bytes=best.box_bytes, predictions=predictions)


def box_sizes(slot_bytes: int) -> tuple[int, ...]:
    """Box sizes to choose from: powers of two that fit a slot, or a small slot itself.

    Raises `LocalError` for a slot of nothing.
    """
    if slot_bytes < 1:
        raise LocalError(f"a slot of {slot_bytes} bytes holds no box", slot_bytes=slot_bytes)
    first, last = SMALLEST_BOX_BYTES.bit_length() - 1, slot_bytes.bit_length() - 1
    return tuple(1 << power for power in range(first, last + 1)) or (slot_bytes,)


def _predict(
    path: Path, work: PathWork, rates: Rates, *, box_bytes: int | None, correction: float
) -> Prediction:
    share_bytes = work.num_bytes / work.num_shares
    bytes_at_once = min(box_bytes or share_bytes, share_bytes)
    num_times = work.num_bytes / bytes_at_once if bytes_at_once else 0.0
    box = _stages(work, rates, num_bytes=bytes_at_once) if bytes_at_once else Stages()
    pace_s = max(box.longest_s, box.sum_s / min(rates.num_cores, rates.slots_in_flight))
    return Prediction(
        path=path,
        seconds=(box.sum_s + (num_times - 1) * pace_s) * correction,
        stages=box.times(num_times),
        correction=correction,
        box_bytes=box_bytes,
        num_boxes=work.num_shares * ceil(share_bytes / box_bytes) if box_bytes else 0,
    )


def _stages(work: PathWork, rates: Rates, *, num_bytes: float) -> Stages:
    """Of so many bytes that go through all stages together."""
    if work.num_copied_runs is not None:
        num_runs = work.num_copied_runs * num_bytes / work.num_bytes
        copy_s = num_bytes / rates.copy_bytes_per_s + num_runs * rates.seconds_per_copied_run
        return Stages(copy_s=copy_s + rates.seconds_per_copy)
    gather_s = scatter_s = 0.0
    if work.gather_run_bytes is not None:
        gather_s = num_bytes / rates.gather_bytes_per_s + rates.seconds_per_request
        gather_s += num_bytes / work.gather_run_bytes * rates.seconds_per_gathered_run
    num_descriptors = max(1.0, (work.num_descriptors or 0) * num_bytes / work.num_bytes)
    read_s = rates.seconds_per_read + num_descriptors * rates.seconds_per_descriptor
    if work.scatter_run_bytes is not None:
        scattered_bytes = num_bytes * work.num_copies
        scatter_s = scattered_bytes / rates.scatter_bytes_per_s
        scatter_s += work.num_copies * rates.seconds_per_copy
        scatter_s += scattered_bytes / work.scatter_run_bytes * rates.seconds_per_scattered_run
    return Stages(
        gather_s=gather_s, read_s=read_s + num_bytes / rates.wire_bytes_per_s, scatter_s=scatter_s
    )
