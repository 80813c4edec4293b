"""Large handoffs in turn with bare NIXL READs of the very same descriptors, and very small ones."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from statistics import median

from kvbus.bench.engines import UNMAPPED, Bench, TimedFetch
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, speed
from kvbus.bench.floor import floor
from kvbus.bench.processes import bare_pair
from kvbus.bench.shapes import SMALL, PairedBlocks, Shape, contiguous, direct_descriptors
from kvbus.bench.stats import in_turn, median_ratio, quantile

MIB = 1 << 20
FIXED, OF_FLOOR, OF_FLOOR_P99 = Target(1.0), Target(2.0), Target(3.0)
NUM_SMALL = 1000
STAGES = ("resolving", "queued", "claiming", "waiting", "reading", "taking")


async def measure_transfer(
    bench: Bench,
    scale: Scale,
    *,
    shape: Shape,
    num_mib: int,
    blocks: Callable[[int, Shape], PairedBlocks],
    of_raw: float,
    unmapped_of_raw: float | None = None,
) -> list[Figure]:
    """In turn, a bare READ, a handoff, and one without mapped memory.

    ``of_raw`` and ``unmapped_of_raw`` are the speeds that they shall have, of the READ's.
    """
    tables = blocks(scale.count(num_mib * MIB // shape.block_bytes), shape)
    rows, size_bytes = direct_descriptors(shape, shape, tables)
    with bare_pair(rows, size_bytes, bench.folder) as raw:
        num_blocks, other = tables.capacities[0], bench.other_agent(UNMAPPED)
        async with (
            bench.engines(shape, num_blocks) as pair,
            bench.reader(shape, num_blocks, pair.source, agent=other) as unmapped,
        ):
            await raw.read_s(b"verify")
            for one in (pair, unmapped):
                await one.verify(tables)
            ways: Mapping[str, Callable[[], Awaitable[float]]] = {
                "raw": raw.read_s,
                "kvbus": partial(pair.timed, tables),
                UNMAPPED: partial(unmapped.timed, tables),
            }
            times = await in_turn(scale.rounds, ways)
    raw_s, kvbus_s, unmapped_s = (median(seconds) for seconds in times.values())
    wanted = None if unmapped_of_raw is None else Target(unmapped_of_raw, at_least=True)
    return [
        Figure("of raw speed, medians", raw_s / kvbus_s, target=Target(of_raw, at_least=True)),
        Figure("of raw speed, by round", median_ratio(times["raw"], times["kvbus"])),
        Figure("unmapped, of raw speed, medians", raw_s / unmapped_s, target=wanted),
        Figure("unmapped, of raw speed, by round", median_ratio(times["raw"], times[UNMAPPED])),
        speed("raw", rows.num_bytes, raw_s),
        speed("kvbus", rows.num_bytes, kvbus_s),
        speed(UNMAPPED, rows.num_bytes, unmapped_s),
        Figure("descriptors", len(rows.local)),
        milliseconds("raw p50", raw_s),
        milliseconds("kvbus p50", kvbus_s),
        milliseconds(f"{UNMAPPED} p50", unmapped_s),
        *_stage_figures(pair.fetches),
        milliseconds("offer to released p50", median(pair.released_s)),
    ]


async def measure_fixed(bench: Bench, scale: Scale) -> list[Figure]:
    """What a handoff of next to nothing costs: one block, after the one before was released.

    In turn with the bare processes of `floor`.
    """
    async with floor(bench.folder) as bare, bench.engines(SMALL, 2) as pair:
        await pair.verify(contiguous(1))
        ways: Mapping[str, Callable[[], Awaitable[float]]] = {
            "floor": bare.hand_off,
            "fixed": partial(pair.timed, contiguous(1)),
        }
        times = await in_turn(scale.count(NUM_SMALL), ways)
    seconds, bare_s = times["fixed"], times["floor"]
    p50, p99 = quantile(seconds, 0.5), quantile(seconds, 0.99)
    bare_p50, bare_p99 = quantile(bare_s, 0.5), quantile(bare_s, 0.99)
    return [
        milliseconds("handoff p50", p50, FIXED),
        milliseconds("handoff p99", p99),
        milliseconds("floor p50", bare_p50),
        milliseconds("floor p99", bare_p99),
        Figure("of the floor, p50", p50 / bare_p50, target=OF_FLOOR),
        Figure("of the floor, p99", p99 / bare_p99, target=OF_FLOOR_P99),
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
