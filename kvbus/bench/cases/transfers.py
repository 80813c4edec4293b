"""Large handoffs in turn with bare NIXL READs of the very same descriptors.

Refuses to compare figures of different minutes: rounds alternate.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

from kvbus.bench.cases.stages import stage_figures
from kvbus.bench.effort import Effort
from kvbus.bench.engines import Bench, Handoff
from kvbus.bench.figures import Figure, Target
from kvbus.bench.raw import raw_pair
from kvbus.bench.shapes import (
    BIG,
    LAYERED,
    Shape,
    Tables,
    contiguous,
    descriptors,
    scattered,
)
from kvbus.bench.spread import Comparison
from kvbus.planning import Descriptors

MIB = 1 << 20
OF_RAW = Target(0.90, at_least=True)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One size and one kind of block table; the cache has twice the blocks of the request."""

    name: str
    shape: Shape
    num_mib: int
    tables: Callable[[int, Shape], Tables]


TRANSFERS = (
    Transfer("contiguous-64m", BIG, 64, contiguous),
    Transfer("contiguous-256m", BIG, 256, contiguous),
    Transfer("scattered-256k", BIG, 64, scattered),
    Transfer("scattered-16k", LAYERED, 64, scattered),
)


def measure_transfer(transfer: Transfer) -> Callable[[Bench, Effort], Awaitable[list[Figure]]]:
    """The case that measures ``transfer``."""

    async def measure(bench: Bench, effort: Effort) -> list[Figure]:
        return await _measure(transfer, bench, effort)

    return measure


async def _measure(transfer: Transfer, bench: Bench, effort: Effort) -> list[Figure]:
    shape = transfer.shape
    tables = transfer.tables(effort.count(transfer.num_mib * MIB // shape.block_bytes), shape)
    num_blocks = 2 * len(tables.prefill)
    rows, size_bytes = descriptors(shape, shape, (num_blocks, num_blocks), tables)
    raw_s: list[float] = []
    handoffs: list[Handoff] = []
    released_s: list[float] = []
    with raw_pair(rows, size_bytes, bench.folder) as raw:
        async with bench.engines(shape, num_blocks) as pair:
            await raw.verify()
            await pair.verify(tables)
            for _ in range(effort.rounds):
                raw_s.append(await raw.read_s())
                handoffs.append(await pair.hand_off(tables))
                released_s += await pair.settle()
    case = transfer.name
    return [
        *_speeds(case, rows, Comparison(raw_s, [handoff.seconds for handoff in handoffs])),
        *stage_figures(case, handoffs),
        Figure(case, "offer to released p50", median(released_s) * 1e3, "ms"),
    ]


def _speeds(case: str, rows: Descriptors, both: Comparison) -> list[Figure]:
    return [
        Figure(case, "of raw speed, medians", both.ratio_of_medians, "", OF_RAW),
        Figure(case, "of raw speed, by round", both.median_ratio, ""),
        Figure(case, "raw", rows.num_bytes / both.baseline_median_s / 1e9, "GB/s"),
        Figure(case, "kvbus", rows.num_bytes / both.our_median_s / 1e9, "GB/s"),
        Figure(case, "descriptors", len(rows.local), ""),
        Figure(case, "raw p50", both.baseline_median_s * 1e3, "ms"),
        Figure(case, "kvbus p50", both.our_median_s * 1e3, "ms"),
    ]
