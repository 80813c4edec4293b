"""Large handoffs in turn with bare NIXL READs of the very same descriptors, and very small ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from kvbus.bench.engines import Bench, TimedFetch
from kvbus.bench.figures import Figure, Target
from kvbus.bench.processes import bare_pair
from kvbus.bench.scale import Scale
from kvbus.bench.shapes import (
    BIG,
    LAYERED,
    SMALL,
    PairedBlocks,
    Shape,
    contiguous,
    descriptors,
    direct_plan,
    scattered,
)
from kvbus.bench.stats import Comparison, quantile
from kvbus.planning import Descriptors

MIB = 1 << 20
OF_RAW = Target(0.90, at_least=True)
NUM_SMALL = 1000
STAGES = ("resolving", "claiming", "waiting", "reading", "confirming")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One size and one kind of block table; the cache has twice the blocks of the request."""

    name: str
    shape: Shape
    num_mib: int
    tables: Callable[[int, Shape], PairedBlocks]


TRANSFERS = (
    Transfer("contiguous-64m", BIG, 64, contiguous),
    Transfer("contiguous-256m", BIG, 256, contiguous),
    Transfer("scattered-256k", BIG, 64, scattered),
    Transfer("scattered-16k", LAYERED, 64, scattered),
)


async def measure_transfer(transfer: Transfer, bench: Bench, scale: Scale) -> list[Figure]:
    """In turn, a bare READ and a handoff."""
    shape = transfer.shape
    tables = transfer.tables(scale.count(transfer.num_mib * MIB // shape.block_bytes), shape)
    num_blocks = 2 * len(tables.prefill)
    plan, size_bytes = direct_plan(shape, shape, (num_blocks, num_blocks))
    rows = descriptors(plan, tables)
    raw_s: list[float] = []
    handoffs: list[TimedFetch] = []
    released_s: list[float] = []
    with bare_pair(rows, size_bytes, bench.folder) as raw:
        async with bench.engines(shape, num_blocks) as pair:
            await raw.read_s("verify")
            await pair.verify(tables)
            for _ in range(scale.rounds):
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


async def measure_fixed(bench: Bench, scale: Scale) -> list[Figure]:
    """What a handoff of next to nothing costs: one block, after the one before was released."""
    case, tables = "fixed", contiguous(1)
    handoffs: list[TimedFetch] = []
    released_s: list[float] = []
    async with bench.engines(SMALL, 2) as pair:
        await pair.verify(tables)
        for _ in range(scale.count(NUM_SMALL)):
            handoffs.append(await pair.hand_off(tables))
            released_s += await pair.settle()
    seconds = [handoff.seconds for handoff in handoffs]
    return [
        Figure(case, "handoff p50", quantile(seconds, 0.5) * 1e3, "ms", Target(2.0)),
        Figure(case, "handoff p99", quantile(seconds, 0.99) * 1e3, "ms"),
        *stage_figures(case, handoffs),
        Figure(case, "offer to released p50", quantile(released_s, 0.5) * 1e3, "ms"),
        Figure(case, "offer to released p99", quantile(released_s, 0.99) * 1e3, "ms"),
        Figure(case, "handoffs", len(handoffs), ""),
    ]


def stage_figures(case: str, handoffs: Sequence[TimedFetch]) -> list[Figure]:
    """Medians of the agent's stages; what no stage has is between engine and agent."""
    by_stage = {
        stage: [getattr(handoff.fetched.stages_s, stage) for handoff in handoffs]
        for stage in STAGES
    }
    inside = [sum(times) for times in zip(*by_stage.values(), strict=True)]
    outside = [handoff.seconds - spent for handoff, spent in zip(handoffs, inside, strict=True)]
    rows = {**by_stage, "engine to agent": outside}
    return [
        Figure(case, f"  {name} p50", median(times) * 1e3, "ms") for name, times in rows.items()
    ]
