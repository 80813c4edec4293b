"""How long the agents' loops are held by a fetch that is very large, or of very many runs."""

from statistics import median

from kvbus.bench.engines import UNMAPPED, Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds
from kvbus.bench.processes import BenchAgent
from kvbus.bench.shapes import BIG, TINY_RUNS, PairedBlocks, Shape, contiguous, scattered
from kvbus.histograms import added_counts, histogram_quantile

BIG_BLOCKS = (4 << 30) // BIG.block_bytes
NUM_RUNS = 655_360
NUM_FETCHES = 5
LAG = Target(20.0)


async def measure_large(bench: Bench, scale: Scale) -> list[Figure]:
    """4 GiB in one run, then 655,360 runs of 512 bytes; each mapped, and not."""
    num_big, num_tiny = scale.count(BIG_BLOCKS), scale.count(NUM_RUNS // TINY_RUNS.num_layers)
    whole = contiguous(num_big)
    figures = await _measure(bench, "4 GiB", BIG, whole, num_blocks=num_big)
    many = scattered(num_tiny, TINY_RUNS)
    return figures + await _measure(bench, "655,360 runs", TINY_RUNS, many, num_blocks=2 * num_tiny)


async def _measure(
    bench: Bench, name: str, shape: Shape, tables: PairedBlocks, *, num_blocks: int
) -> list[Figure]:
    figures: list[Figure] = []
    async with bench.source(shape, num_blocks) as source:
        for way, agent in {
            "mapped": bench.agents["decode agent"],
            UNMAPPED: bench.other_agent(UNMAPPED),
        }.items():
            async with bench.reader(shape, num_blocks, source, agent=agent) as pair:
                await pair.verify(tables)
                agents = {"prefill agent": bench.agents["prefill agent"], "decode agent": agent}
                figures += await _fetches(f"{name}, {way}", pair, tables, agents)
    return figures


async def _fetches(
    name: str, pair: EnginePair, tables: PairedBlocks, agents: dict[str, BenchAgent]
) -> list[Figure]:
    before = {role: agent.lag_counts() for role, agent in agents.items()}
    seconds = [await pair.timed(tables) for _ in range(NUM_FETCHES)]
    lags = {role: added_counts(before[role], one.lag_counts()) for role, one in agents.items()}
    return [
        milliseconds(f"{name}: p50", median(seconds)),
        *(
            milliseconds(f"{name}: {role} loop lag p99", histogram_quantile(lag, 0.99), LAG)
            for role, lag in lags.items()
            if any(lag.values())
        ),
    ]
