"""What the agents cost beside the handoffs: CPU while nothing happens, memory that does not shrink.

The memory is the decode agent's anonymous memory after fetches of 81,920 descriptors.
"""

import re
from pathlib import Path

import anyio

from kvbus.bench.engines import Bench
from kvbus.bench.figures import Figure, Scale, Target
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
    shares = {name: (after[name] - before[name]) / duration_s * 100 for name in bench.agents}
    return [Figure(f"{name} CPU", n, "% of a core", OF_A_CORE) for name, n in shares.items()]


async def measure_memory(bench: Bench, scale: Scale) -> list[Figure]:
    """Growth over many direct fetches, after some that fill caches and pools."""
    num_blocks = scale.count(NUM_DESCRIPTORS // TINY_RUNS.num_layers)
    tables, capacity = scattered(num_blocks, TINY_RUNS), 2 * num_blocks
    num_fetches = scale.count(NUM_FETCHES)
    direct = bench.other_agent("direct")
    async with (
        bench.source(TINY_RUNS, capacity) as source,
        bench.reader(TINY_RUNS, capacity, source, agent=direct) as pair,
    ):
        for _ in range(NUM_WARM_UP):
            await pair.timed(tables)
        before = _anonymous_bytes(direct.child.pid)
        for _ in range(num_fetches):
            await pair.timed(tables)
        await pair.verify(tables)
        after = _anonymous_bytes(direct.child.pid)
    return [
        Figure("growth", (after - before) / num_fetches, "bytes a fetch", GROWTH_BYTES),
        Figure("before", before / 1e6, "MB"),
        Figure("after", after / 1e6, "MB"),
        Figure("descriptors", num_blocks * TINY_RUNS.num_layers),
        Figure("fetches", num_fetches),
    ]


def _anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own, neither a file's nor shared."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
