"""Parts of a handoff, measured without one: what planning takes, and what an agent measures."""

import time
from dataclasses import asdict
from functools import partial
from statistics import median

import anyio

from kvbus.bench.cases.reshapes import RESHAPES
from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure, Target
from kvbus.bench.scale import Scale
from kvbus.bench.shapes import NHD_1, descriptors, direct_plan, scattered_tokens
from kvbus.geometry import num_blocks_for

NUM_TOKENS = 16_384
OF_DESCRIPTOR = Target(60.0)
MEASURE_S = 30.0


async def measure_planning(_bench: Bench, scale: Scale) -> list[Figure]:
    """How long the direct path's descriptors take to make, before neighbours are merged."""
    num_tokens = scale.count(NUM_TOKENS, at_least=64)
    pairs = {one.name: (one.source, one.target) for one in RESHAPES} | {"equal": (NHD_1, NHD_1)}
    figures = []
    for name, (source, target) in pairs.items():
        tables = scattered_tokens(source, target, num_tokens)
        capacities = (
            2 * num_blocks_for(num_tokens, source.block_size),
            2 * num_blocks_for(num_tokens, target.block_size),
        )
        plan, _ = direct_plan(source, target, capacities)
        times_s = []
        for _ in range(scale.rounds):
            began = time.perf_counter()
            rows = descriptors(plan, tables)
            times_s.append(time.perf_counter() - began)
        took_ns = median(times_s) / len(rows.local) * 1e9
        figures.append(Figure("planning", name, took_ns, "ns a descriptor", OF_DESCRIPTOR))
    return figures


async def measure_rates(bench: Bench, _scale: Scale) -> list[Figure]:
    """What an agent measures at its start: READs within a process, and copies of packed boxes."""
    from kvbus.memory.copy_rates import measure_copies  # noqa: PLC0415 - nobody else needs them
    from kvbus.transport.calibration import measure_reads  # noqa: PLC0415 - nor NIXL in here

    name = f"bench/{bench.folder.name}"
    reads = await anyio.to_thread.run_sync(partial(measure_reads, name, timeout_s=MEASURE_S))
    copies = await anyio.to_thread.run_sync(measure_copies)
    return [_rate_figure(name, n) for name, n in (asdict(reads) | asdict(copies)).items()]


def _rate_figure(name: str, value: float) -> Figure:
    if name.startswith("seconds_"):
        return Figure("rates", name, value * 1e6, "µs")
    return Figure("rates", name, value / 1e9, "GB/s")
