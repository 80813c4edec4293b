"""What the agents cost beside the handoffs: CPU while nothing happens, memory that does not shrink.

The memory is the decode agent's anonymous memory after fetches of 81,920 descriptors.
"""

import re
from pathlib import Path

import anyio

from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure, Target
from kvbus.bench.processes import agent
from kvbus.bench.scale import Scale
from kvbus.bench.shapes import SMALL, TINY_RUNS, contiguous, scattered

CALM_S = 1.0
DURATION_S = 20.0
OF_A_CORE = Target(1.0)
NUM_DESCRIPTORS = 81_920
NUM_FETCHES, NUM_WARM_UP = 100, 10
GROWTH_BYTES = Target(64 << 10)


async def measure_idle(bench: Bench, scale: Scale) -> list[Figure]:
    """CPU time of the agents over a while without work: engines attached, peers warm."""
    duration_s = scale.seconds(DURATION_S)
    async with bench.engines(SMALL, 2) as pair:
        await pair.verify(contiguous(1))
        await anyio.sleep(CALM_S)
        before = bench.cpu_s()
        await anyio.sleep(duration_s)
        after = bench.cpu_s()
    return [
        Figure(
            "idle",
            f"{name} CPU",
            (after[name] - before[name]) / duration_s * 100,
            "% of a core",
            OF_A_CORE,
        )
        for name in ("prefill agent", "decode agent")
    ]


async def measure_memory(bench: Bench, scale: Scale) -> list[Figure]:
    """Growth over many direct fetches, after some that fill caches and pools."""
    num_blocks = scale.count(NUM_DESCRIPTORS // TINY_RUNS.num_layers)
    tables, capacity = scattered(num_blocks, TINY_RUNS), 2 * num_blocks
    num_fetches = scale.count(NUM_FETCHES)
    with agent("decode", bench.folder, path="direct") as direct:
        async with (
            bench.source(TINY_RUNS, capacity) as engine_id,
            bench.reader(
                TINY_RUNS, capacity, engine_id, (TINY_RUNS, capacity), agent=direct
            ) as pair,
        ):
            before = 0
            for number in range(-NUM_WARM_UP, num_fetches):
                if number == 0:
                    before = anonymous_bytes(direct.pid)
                await pair.hand_off(tables)
                await pair.settle()
            await pair.verify(tables)
            after = anonymous_bytes(direct.pid)
    return [
        Figure("memory", "growth", (after - before) / num_fetches, "bytes a fetch", GROWTH_BYTES),
        Figure("memory", "before", before / 1e6, "MB"),
        Figure("memory", "after", after / 1e6, "MB"),
        Figure("memory", "descriptors", num_blocks * TINY_RUNS.num_layers, ""),
        Figure("memory", "fetches", num_fetches, ""),
    ]


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own, neither a file's nor shared."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
