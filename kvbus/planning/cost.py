"""What a fetch would take on each path, in seconds, and the choice of path and box size.

Refuses to measure: rates come from `kvbus.agent.process.calibration`, corrections from `PeerRates`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import ceil, isfinite

from kvbus.errors import LocalError
from kvbus.planning.fetch_shape import (
    ALL_PATHS,
    DirectWork,
    FetchShape,
    PackedWork,
    Path,
    ReorderedWork,
)

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
    """Seconds that gather, READ and scatter take, of one box or of a whole fetch."""

    gather_s: float = 0.0
    read_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def sum_s(self) -> float:
        """One after the other."""
        return self.gather_s + self.read_s + self.scatter_s

    @property
    def longest_s(self) -> float:
        """The stage that sets the pace when there are cores for all."""
        return max(self.gather_s, self.read_s, self.scatter_s)

    def times(self, factor: float) -> "Stages":
        """So many of them."""
        return Stages(
            gather_s=self.gather_s * factor,
            read_s=self.read_s * factor,
            scatter_s=self.scatter_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a fetch would take on one path.

    ``seconds`` is corrected by ``correction``, ``stages`` are not: they are the seconds that each
    stage is busy. The direct path has no boxes.
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


def predict(
    shape: FetchShape, path: Path, rates: Rates, *, slot_bytes: int, correction: float = 1.0
) -> Prediction:
    """Seconds of a fetch on one path, with the box size that is best for it.

    Direct: the READ, its descriptors and its bytes one after the other, as NIXL does them.

    In boxes, the first one goes through its stages alone; each further one adds the *pace*::

        seconds = sum of stages + (boxes - 1) * max(longest stage, sum of stages / lanes)
        lanes   = min(cores, slots in flight)

    so no stage is faster than itself, and no more stages run at once than there are cores and
    slots: with one lane nothing overlaps, with three the longest stage hides the others. A
    request's round trip counts as a part of its gather. Boxes are counted in fractions, so that
    a byte more never makes a fetch cheaper. Raises `LocalError` when the fetch has no such path.
    """
    work = shape.work(path)
    if work is None:
        raise LocalError(f"the fetch cannot take the path '{path.value}'", path=path.value)
    if isinstance(work, DirectWork):
        best = _predict_direct(work, rates)
    else:
        sizes = box_sizes(slot_bytes)
        found = [_predict_boxes(path, work, rates, box_bytes=size) for size in sizes]
        best = min(reversed(found), key=lambda prediction: prediction.seconds)
    return Prediction(
        path=path,
        seconds=best.seconds * correction,
        stages=best.stages,
        correction=correction,
        box_bytes=best.box_bytes,
        num_boxes=best.num_boxes,
    )


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
        if path in paths and shape.work(path) is not None
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


def _predict_direct(work: DirectWork, rates: Rates) -> Prediction:
    if not work.num_descriptors:
        return Prediction(path=Path.DIRECT, seconds=0.0, stages=Stages())
    stages = Stages(read_s=_read_s(rates, work.num_descriptors, work.num_bytes))
    return Prediction(path=Path.DIRECT, seconds=stages.sum_s, stages=stages)


def _predict_boxes(
    path: Path, work: PackedWork | ReorderedWork, rates: Rates, *, box_bytes: int
) -> Prediction:
    if not work.num_bytes:
        return Prediction(path=path, seconds=0.0, stages=Stages(), box_bytes=box_bytes)
    share_bytes = work.num_bytes / work.num_shares
    piece_bytes = min(box_bytes, share_bytes)
    num_pieces = work.num_bytes / piece_bytes
    box = _box_stages(work, rates, num_bytes=piece_bytes)
    pace_s = max(box.longest_s, box.sum_s / min(rates.num_cores, rates.slots_in_flight))
    return Prediction(
        path=path,
        seconds=box.sum_s + (num_pieces - 1) * pace_s,
        stages=box.times(num_pieces),
        box_bytes=box_bytes,
        num_boxes=work.num_shares * ceil(share_bytes / box_bytes),
    )


def _box_stages(work: PackedWork | ReorderedWork, rates: Rates, *, num_bytes: float) -> Stages:
    gather_s = num_bytes / rates.gather_bytes_per_s
    gather_s += num_bytes / work.gather_run_bytes * rates.seconds_per_gathered_run
    gather_s += rates.seconds_per_request
    if isinstance(work, ReorderedWork):
        num_descriptors = max(1.0, work.num_descriptors * num_bytes / work.num_bytes)
        return Stages(gather_s=gather_s, read_s=_read_s(rates, num_descriptors, num_bytes))
    scatter_s = num_bytes / rates.scatter_bytes_per_s
    scatter_s += num_bytes / work.scatter_run_bytes * rates.seconds_per_scattered_run
    return Stages(gather_s=gather_s, read_s=_read_s(rates, 1, num_bytes), scatter_s=scatter_s)


def _read_s(rates: Rates, num_descriptors: float, num_bytes: float) -> float:
    per_bytes_s = num_bytes / rates.wire_bytes_per_s
    return rates.seconds_per_read + num_descriptors * rates.seconds_per_descriptor + per_bytes_s
