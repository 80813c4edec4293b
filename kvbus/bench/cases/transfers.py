"""Large handoffs in turn with bare NIXL READs of the very same descriptors, and very small ones."""

from collections.abc import Callable, Sequence
from statistics import median

from kvbus.bench.engines import Bench, TimedFetch
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, speed
from kvbus.bench.processes import bare_pair
from kvbus.bench.shapes import SMALL, PairedBlocks, Shape, contiguous, direct_descriptors
from kvbus.bench.stats import in_turn, median_ratio, quantile

MIB = 1 << 20
OF_RAW = Target(0.90, at_least=True)
FIXED = Target(2.0)
NUM_SMALL = 1000
STAGES = ("resolving", "queued", "claiming", "waiting", "reading", "confirming")


async def measure_transfer(
    bench: Bench,
    scale: Scale,
    *,
    shape: Shape,
    num_mib: int,
    blocks: Callable[[int, Shape], PairedBlocks],
) -> list[Figure]:
    """In turn, a bare READ and a handoff."""
    tables = blocks(scale.count(num_mib * MIB // shape.block_bytes), shape)
    rows, size_bytes = direct_descriptors(shape, shape, tables)
    with bare_pair(rows, size_bytes, bench.folder) as raw:
        async with bench.engines(shape, tables.capacities[0]) as pair:
            await raw.read_s(b"verify")
            await pair.verify(tables)
            times = await in_turn(
                scale.rounds, {"raw": raw.read_s, "kvbus": lambda: pair.timed(tables)}
            )
    raw_s, kvbus_s = (median(seconds) for seconds in times.values())
    return [
        Figure("of raw speed, medians", raw_s / kvbus_s, target=OF_RAW),
        Figure("of raw speed, by round", median_ratio(times["raw"], times["kvbus"])),
        speed("raw", rows.num_bytes, raw_s),
        speed("kvbus", rows.num_bytes, kvbus_s),
        Figure("descriptors", len(rows.local)),
        milliseconds("raw p50", raw_s),
        milliseconds("kvbus p50", kvbus_s),
        *_stage_figures(pair.fetches),
        milliseconds("offer to released p50", median(pair.released_s)),
    ]


async def measure_fixed(bench: Bench, scale: Scale) -> list[Figure]:
    """What a handoff of next to nothing costs: one block, after the one before was released."""
    async with bench.engines(SMALL, 2) as pair:
        await pair.verify(contiguous(1))
        ways = {"fixed": lambda: pair.timed(contiguous(1))}
        seconds = (await in_turn(scale.count(NUM_SMALL), ways))["fixed"]
    return [
        milliseconds("handoff p50", quantile(seconds, 0.5), FIXED),
        milliseconds("handoff p99", quantile(seconds, 0.99)),
        *_stage_figures(pair.fetches),
        milliseconds("offer to released p50", quantile(pair.released_s, 0.5)),
        milliseconds("offer to released p99", quantile(pair.released_s, 0.99)),
        Figure("handoffs", len(seconds)),
    ]


def _stage_figures(fetches: Sequence[TimedFetch]) -> list[Figure]:
    """Medians of the agent's stages; what no stage has is between engine and agent."""
    stages = [[getattr(one.fetched.stages_s, stage) for stage in STAGES] for one in fetches]
    outside = [one.seconds - sum(times) for one, times in zip(fetches, stages, strict=True)]
    by_stage = [*zip(*stages, strict=True), outside]
    return [
        milliseconds(f"  {name} p50", median(times))
        for name, times in zip((*STAGES, "engine to agent"), by_stage, strict=True)
    ]
