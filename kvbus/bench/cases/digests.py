"""What it costs to compare all that was read, or a sample of it, with what the prefill side has."""

from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure, Scale, Target, milliseconds
from kvbus.bench.shapes import BIG, LAYERED, Shape, scattered
from kvbus.bench.stats import in_turn, median_ratio

MIB = 1 << 20
NUM_MIB = 64
TARGETS = {"sampled": Target(1.01), "full": Target(1.1)}


async def measure_digests(bench: Bench, scale: Scale) -> list[Figure]:
    """64 MiB in runs of 256 KiB and of 16 KiB, mapped and not: off, sampled and full in turn."""
    figures: list[Figure] = []
    for name, shape in {"256 KiB": BIG, "16 KiB": LAYERED}.items():
        for way in ("mapped", "unmapped"):
            figures += await _measure(bench, scale, f"{name}, {way}", shape, way)
    return figures


async def _measure(bench: Bench, scale: Scale, name: str, shape: Shape, way: str) -> list[Figure]:
    tables = scattered(scale.count(NUM_MIB * MIB // shape.block_bytes), shape)
    num_blocks = tables.capacities[0]
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(bench.source(shape, num_blocks))
        timed = {}
        for digest in ("off", *TARGETS):
            agent = bench.other_agent(f"{way}-{digest}")
            reader = bench.reader(shape, num_blocks, source, agent=agent)
            pair = await stack.enter_async_context(reader)
            await pair.verify(tables)
            timed[digest] = partial(pair.timed, tables)
        times = await in_turn(scale.rounds, timed)
    return [
        *(
            Figure(
                f"{name}: {digest}, of the time without, by round",
                median_ratio(times[digest], times["off"]),
                target=target,
            )
            for digest, target in TARGETS.items()
        ),
        *(milliseconds(f"{name}: {digest} p50", median(some)) for digest, some in times.items()),
    ]
