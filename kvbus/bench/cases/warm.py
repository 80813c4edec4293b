"""What the first handoff between two agents costs, beside later ones of the same two.

Each round has agents of its own, and a prefill engine; only the process of the decode engine has
done handoffs before.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from statistics import median

import anyio

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds
from kvbus.bench.processes import BenchAgent, agent, answering
from kvbus.bench.shapes import BIG, PairedBlocks, contiguous
from kvbus.errors import RequestTimeout
from kvbus.spawn import free_port

NUM_ROUNDS, NUM_HANDOFFS = 8, 12
LATE = slice(8, 12)
"""The tenth, and those beside it."""
FIRST_OF_TENTH = Target(1.3)
WARM_WITHIN_S, LOOK_S = 30.0, 0.05
SETTLE_S = 1.0
SIZES = {"256 KiB": 1, "64 MiB": 256}
WAYS = {"mapped": True, "unmapped": False}


async def measure_warm(bench: Bench, scale: Scale) -> list[Figure]:
    """With the prefill agent listed in `peers`, and without."""
    figures = []
    num_rounds, number = scale.count(NUM_ROUNDS, at_least=1), 0
    for way, mapped in WAYS.items():
        for size, num_blocks in SIZES.items():
            tables = contiguous(scale.count(num_blocks, at_least=1), BIG)
            times: dict[bool, list[list[float]]] = {True: [], False: []}
            for is_listed in num_rounds * [True, False]:
                number += 1
                one = _pair(bench, number, tables, mapped=mapped, is_listed=is_listed)
                async with one as pair:
                    times[is_listed].append([await pair.timed(tables) for _ in range(NUM_HANDOFFS)])
            figures += _figures(f"{way}, {size}", times)
    return figures


def _figures(what: str, times: Mapping[bool, list[list[float]]]) -> list[Figure]:
    first_s, cold_s = (median(one[0] for one in times[listed]) for listed in (True, False))
    tenth_s = median(seconds for one in times[True] for seconds in one[LATE])
    return [
        Figure(f"{what}: first of tenth, medians", first_s / tenth_s, target=FIRST_OF_TENTH),
        milliseconds("  first p50", first_s),
        milliseconds("  tenth p50", tenth_s),
        milliseconds("  first p50, not listed", cold_s),
    ]


@asynccontextmanager
async def _pair(
    bench: Bench, number: int, tables: PairedBlocks, *, mapped: bool, is_listed: bool
) -> AsyncIterator[EnginePair]:
    """Engines beside new agents, which know each other if they are to."""
    label, endpoint = f"new-{number}", f"tcp://127.0.0.1:{free_port()}"
    theirs = {"peer_bind": endpoint, "shake_hands_ahead": "anybody"}
    ours: dict[str, bool | list[str]] = {"mapped": mapped}
    if is_listed:
        ours["peers"] = [endpoint]
    folder, module = bench.folder, "kvbus.bench.prefill_engine"
    with ExitStack() as stack:
        prefill = stack.enter_context(agent("prefill", folder, label=label, settings=theirs))
        decode = stack.enter_context(agent("decode", folder, label=label, settings=ours))
        path = str(prefill.attach_path)
        engines = stack.enter_context(answering(f"engine {number}", module, path, folder=folder))
        agents = {"prefill agent": prefill, "decode agent": decode}
        new = Bench(agents, engines, folder, stack)
        async with new.engines(BIG, tables.capacities[0]) as pair:
            if is_listed:
                await _until_warm(decode)
            await anyio.sleep(SETTLE_S)  # both: a start has other work behind it
            yield pair


async def _until_warm(decode: BenchAgent) -> None:
    with anyio.move_on_after(WARM_WITHIN_S):
        await anyio.to_thread.run_sync(_look, decode, abandon_on_cancel=True)
        return
    raise RequestTimeout(f"the peer was not warm within {WARM_WITHIN_S:g} s")


def _look(decode: BenchAgent) -> None:
    while not decode.reading("warm_peers"):
        time.sleep(LOOK_S)
