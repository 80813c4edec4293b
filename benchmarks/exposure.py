"""Measures what ``exposure = "staging"`` costs: handoffs with it and without, in turn.

Run it from the repository's root: ``python benchmarks/exposure.py``. Each way has a prefill agent,
a decode agent and a prefill engine of its own, which sleep while the other way has its turn. Of
each size, medians and their ratio; a busy machine changes the medians more than the ratio.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from statistics import median

import anyio

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.processes import agent, answering
from kvbus.bench.shapes import BIG, SMALL, PairedBlocks, Shape, scattered
from kvbus.bench.stats import in_turn

WAYS = ("memory", "staging")
SIZES: dict[str, tuple[Shape, int, int]] = {
    "64 KiB": (SMALL, 1, 20),
    "4 MiB": (BIG, 16, 4),
    "64 MiB": (BIG, 256, 1),
}
"""Shape, number of blocks, handoffs for each round."""


@contextmanager
def site(way: str, folder: Path) -> Iterator[Bench]:
    """Two agents and a process for prefill engines; the prefill agent has this exposure."""
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:
        prefill = stack.enter_context(agent("prefill", folder, exposure=way))
        decode = stack.enter_context(agent("decode", folder))
        module, path = "kvbus.bench.prefill_engine", str(prefill.attach_path)
        engines = stack.enter_context(answering("prefill engine", module, path, folder=folder))
        agents = {"prefill agent": prefill, "decode agent": decode}
        yield Bench(agents, engines, folder, stack)


async def measure(
    sites: dict[str, Bench], shape: Shape, tables: PairedBlocks, rounds: int
) -> dict[str, list[float]]:
    """Seconds of the fetches, by exposure."""
    async with AsyncExitStack() as stack:
        pairs: dict[str, EnginePair] = {}
        for way, bench in sites.items():
            engines = bench.engines(shape, tables.capacities[0])
            pairs[way] = await stack.enter_async_context(engines)
            await pairs[way].verify(tables)
        ways = {way: lambda pair=pair: pair.timed(tables) for way, pair in pairs.items()}
        return await in_turn(rounds, ways)


async def main(rounds: int, folder: Path) -> None:
    """Print a line for each size."""
    with ExitStack() as stack:
        sites = {way: stack.enter_context(site(way, folder / way)) for way in WAYS}
        for name, (shape, num_blocks, times) in SIZES.items():
            seconds = await measure(sites, shape, scattered(num_blocks, shape), rounds * times)
            memory, staging = (median(seconds[way]) for way in WAYS)
            print(
                f"{name:>7}: memory {memory * 1e3:.2f} ms, staging {staging * 1e3:.2f} ms, "
                f"ratio {staging / memory:.2f}"
            )


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=20)
with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as name:
    anyio.run(main, parser.parse_args().rounds, Path(name))
