"""Handoffs between engines of different shapes, by each path, beside one between equal engines."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from statistics import median

import numpy as np

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, speed
from kvbus.bench.processes import bare_pair
from kvbus.bench.shapes import Shape, direct_descriptors, scattered_tokens
from kvbus.bench.stats import in_turn

NUM_BYTES = 64 << 20
OTHERS = ("mapped", "unmapped", "direct", "packed")
OF_NAIVE = Target(8.0, at_least=True)
OF_EQUAL = Target(0.7, at_least=True)
PACKED_OF_NAIVE = Target(6.0, at_least=True)
OF_BEST = Target(1 / 1.2, at_least=True)


async def measure_reshape(
    bench: Bench,
    scale: Scale,
    *,
    source: Shape,
    target: Shape,
    of_naive: Target | None = None,
    packed_of_naive: Target | None = None,
) -> list[Figure]:
    """Of 64 MiB in scattered blocks: a READ of all runs, each path, a handoff of equal engines."""
    num_tokens = scale.count(NUM_BYTES // target.token_bytes, at_least=source.block_size)
    tables = scattered_tokens(source, target, num_tokens)
    rows, size_bytes = direct_descriptors(source, target, tables)
    with bare_pair(rows, size_bytes, bench.folder) as raw:
        async with _readers(bench, source, target, capacities=tables.capacities) as readers:
            ways = {"naive": raw.read_s}
            for name, pair in readers.items():
                blocks = scattered_tokens(pair.source.shape, target, num_tokens)
                await pair.verify(blocks)
                ways[name] = partial(pair.timed, blocks)
            times = await in_turn(scale.rounds, ways)
    num_bytes = num_tokens * target.token_bytes
    seconds = {name: median(one) for name, one in times.items()}
    copy_s = median(_copy_s(num_bytes) for _ in range(scale.rounds))
    unmapped_s = min(seconds["direct"], seconds["packed"])
    best_s = min(seconds["mapped"], unmapped_s)
    return [
        Figure("auto of naive", seconds["naive"] / seconds["auto"], target=of_naive),
        Figure("auto of equal shapes", seconds["equal"] / seconds["auto"], target=OF_EQUAL),
        Figure("auto of the best path", best_s / seconds["auto"], target=OF_BEST),
        Figure("unmapped, of its best path", unmapped_s / seconds["unmapped"], target=OF_BEST),
        Figure("packed of naive", seconds["naive"] / seconds["packed"], target=packed_of_naive),
        Figure("direct of naive", seconds["naive"] / seconds["direct"]),
        *(speed(f"  {name}", num_bytes, s) for name, s in {**seconds, "memcpy": copy_s}.items()),
        *(milliseconds(f"  {name} p50", s) for name, s in seconds.items()),
        Figure("naive descriptors", len(rows.local)),
    ]


@asynccontextmanager
async def _readers(
    bench: Bench, source_shape: Shape, target: Shape, *, capacities: tuple[int, int]
) -> AsyncIterator[Mapping[str, EnginePair]]:
    """A decode engine for each path, all of one source, and one that is equal to its own source."""
    num_source, num_target = capacities
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(bench.source(source_shape, num_source))
        readers = {"equal": await stack.enter_async_context(bench.engines(target, num_target))}
        for label in ("auto", *OTHERS):
            agent = bench.other_agent(label) if label in OTHERS else None
            reader = bench.reader(target, num_target, source, agent=agent)
            readers[label] = await stack.enter_async_context(reader)
        yield readers


def _copy_s(num_bytes: int) -> float:
    """Seconds of a memcpy whose memory has been touched before."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    target[:] = 1
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began
