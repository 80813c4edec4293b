"""Handoffs between engines of different shapes, by each path, beside one between equal engines."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Target
from kvbus.bench.processes import BarePair, agent, bare_pair
from kvbus.bench.scale import Scale
from kvbus.bench.shapes import (
    HND_1,
    MLA_1,
    MLA_2,
    NHD_1,
    NHD_2,
    NHD_64,
    PairedBlocks,
    Shape,
    descriptors,
    direct_plan,
    scattered_tokens,
)
from kvbus.geometry import num_blocks_for

NUM_BYTES = 64 << 20
FORCED = ("direct", "packed", "reordered")
OF_EQUAL = Target(0.4, at_least=True)
OF_NAIVE = Target(6.0, at_least=True)
OF_BEST = Target(1 / 1.2, at_least=True)


@dataclass(frozen=True, slots=True)
class Reshape:
    """Two shapes between which 64 MiB go, in scattered blocks."""

    name: str
    source: Shape
    target: Shape
    of_naive: Target | None = None


RESHAPES = (
    Reshape("tp-1-to-2", NHD_1, NHD_2, OF_NAIVE),
    Reshape("tp-2-to-1", NHD_2, NHD_1),
    Reshape("hnd-to-nhd", HND_1, NHD_1),
    Reshape("block-64-to-16", NHD_64, NHD_1),
    Reshape("mla-2-to-1", MLA_2, MLA_1),
)


async def measure_reshape(reshape: Reshape, bench: Bench, scale: Scale) -> list[Figure]:
    """A READ of all runs, each path in turn, and a handoff between equal engines."""
    source, target = reshape.source, reshape.target
    num_tokens = scale.count(NUM_BYTES // target.token_bytes, at_least=source.block_size)
    tables = scattered_tokens(source, target, num_tokens)
    same = scattered_tokens(target, target, num_tokens)
    num_bytes = num_tokens * target.token_bytes
    capacities = _capacity(source, num_tokens), _capacity(target, num_tokens)
    plan, size_bytes = direct_plan(source, target, capacities)
    rows = descriptors(plan, tables)
    with bare_pair(rows, size_bytes, bench.folder) as raw:
        async with _readers(bench, reshape, num_tokens) as readers:
            for name, pair in readers.items():
                await pair.verify(same if name == "equal" else tables)
            times = await _rounds(raw, readers, {"equal": same}, tables, scale.rounds)
    copy_s = median(_copy_s(num_bytes) for _ in range(scale.rounds))
    return _figures(reshape, times, copy_s, num_bytes=num_bytes, num_descriptors=len(rows.local))


@asynccontextmanager
async def _readers(
    bench: Bench, reshape: Reshape, num_tokens: int
) -> AsyncIterator[Mapping[str, EnginePair]]:
    """A decode engine for each path, all of one source, and one that is equal to its own source."""
    source, target = reshape.source, reshape.target
    num_source, num_target = _capacity(source, num_tokens), _capacity(target, num_tokens)
    async with AsyncExitStack() as stack:
        engine_id = await stack.enter_async_context(bench.source(source, num_source))
        equal = await stack.enter_async_context(bench.engines(target, num_target))
        readers = {"equal": equal}
        for path in ("auto", *FORCED):
            forced = path if path != "auto" else ""
            decode = bench.decode_agent
            if forced:
                decode = stack.enter_context(agent("decode", bench.folder, path=path))
            readers[path] = await stack.enter_async_context(
                bench.reader(target, num_target, engine_id, (source, num_source), agent=decode)
            )
        yield readers


async def _rounds(
    raw: BarePair,
    readers: Mapping[str, EnginePair],
    other_tables: Mapping[str, PairedBlocks],
    tables: PairedBlocks,
    rounds: int,
) -> dict[str, float]:
    """Median seconds of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ("naive", *readers)}
    for _ in range(rounds):
        times["naive"].append(await raw.read_s())
        for name, pair in readers.items():
            handoff = await pair.hand_off(other_tables.get(name, tables))
            times[name].append(handoff.seconds)
            await pair.settle()
    return {name: median(seconds) for name, seconds in times.items()}


def _figures(
    reshape: Reshape,
    times: Mapping[str, float],
    copy_s: float,
    *,
    num_bytes: int,
    num_descriptors: int,
) -> list[Figure]:
    case = reshape.name
    boxed_s = min(times["packed"], times["reordered"])
    best_s = min(times[path] for path in FORCED)
    speeds = {**times, "memcpy": copy_s}
    return [
        Figure(case, "auto of equal shapes", times["equal"] / times["auto"], "", OF_EQUAL),
        Figure(case, "auto of the best path", best_s / times["auto"], "", OF_BEST),
        Figure(case, "packed of naive", times["naive"] / boxed_s, "", reshape.of_naive),
        Figure(case, "direct of naive", times["naive"] / times["direct"], ""),
        *(
            Figure(case, f"  {name}", num_bytes / seconds / 1e9, "GB/s")
            for name, seconds in speeds.items()
        ),
        *(Figure(case, f"  {name} p50", seconds * 1e3, "ms") for name, seconds in times.items()),
        Figure(case, "naive descriptors", num_descriptors, ""),
    ]


def _copy_s(num_bytes: int) -> float:
    """Seconds of a memcpy whose memory has been touched before."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    target[:] = 1
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


def _capacity(shape: Shape, num_tokens: int) -> int:
    """Blocks of a cache of which every other one is used."""
    return 2 * num_blocks_for(num_tokens, shape.block_size)
