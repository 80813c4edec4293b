"""Handoffs of KV that is not ready when it is asked for: computed in chunks, or saved into a ring.

A prefill here computes by waiting; a device is private memory, and its copies are timed alone too.
"""

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from statistics import median
from typing import TypeVar

import numpy as np
import torch

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Target
from kvbus.bench.ranks import block_copy, private_cache
from kvbus.bench.scale import Scale
from kvbus.bench.shapes import BIG, BIG_HOST, GROUP, LAYERED, PairedBlocks, scattered
from kvbus.engine.bounce import Direction, HostBlocks

K = TypeVar("K")

NUM_CHUNKS = 8
LAYERED_BLOCKS = (64 << 20) // LAYERED.block_bytes
CHUNK_S = 0.03
OF_WHOLE = Target(0.5)
BIG_BLOCKS = (64 << 20) // BIG.block_bytes
OF_TWO_PASSES = Target(1.0)
SIDES = {
    "shared to shared": (BIG, BIG),
    "host to shared": (BIG_HOST, BIG),
    "shared to host": (BIG, BIG_HOST),
    "host to host": (BIG_HOST, BIG_HOST),
}


async def measure_chunked(bench: Bench, scale: Scale) -> list[Figure]:
    """In turn: a prefill of one chunk, and one of eight."""
    num_blocks = scale.count(LAYERED_BLOCKS, at_least=NUM_CHUNKS)
    tables = scattered(num_blocks, LAYERED)
    times: dict[int, list[float]] = {1: [], NUM_CHUNKS: []}
    async with bench.engines(LAYERED, 2 * num_blocks) as pair:
        await pair.verify(tables)
        for _ in range(scale.rounds):
            for num_chunks, seconds in times.items():
                seconds.append(await _computed_s(pair, tables, num_chunks))
    whole_s, chunked_s = (median(seconds) for seconds in times.values())
    return [
        Figure("chunked", "of the time without", chunked_s / whole_s, "", OF_WHOLE),
        Figure("chunked", "end of prefill to end of fetch", chunked_s * 1e3, "ms"),
        Figure("chunked", "the same without chunks", whole_s * 1e3, "ms"),
    ]


async def _computed_s(pair: EnginePair, tables: PairedBlocks, num_chunks: int) -> float:
    """From when the last chunk was ready until the fetch is complete.

    Both processes are on one machine, whose monotonic clock they share.
    """
    chunk_s = CHUNK_S * NUM_CHUNKS / num_chunks
    ticket = await pair.compute(tables, num_chunks, chunk_s)
    await pair.fetch(ticket, tables)
    completed_at = time.perf_counter()
    ((ready_at, _),) = await pair.ended()
    return completed_at - ready_at


async def measure_host(bench: Bench, scale: Scale) -> list[Figure]:
    """64 MiB in scattered blocks, by each pair of memories in turn, and the bare copies."""
    num_blocks = scale.count(BIG_BLOCKS)
    tables = scattered(num_blocks, BIG)
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    passes: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    async with AsyncExitStack() as stack:
        pairs: dict[str, EnginePair] = {}
        for name, (source, target) in SIDES.items():
            engine_id = await stack.enter_async_context(bench.source(source, 2 * num_blocks))
            reader = bench.reader(target, 2 * num_blocks, engine_id, (source, 2 * num_blocks))
            pairs[name] = await stack.enter_async_context(reader)
            await pairs[name].verify(tables)
        for _ in range(scale.rounds):
            for name, pair in pairs.items():
                times[name].append(await _published_s(pair, tables))
                await pair.settle()
            for direction in Direction:
                passes[direction].append(_pass_s(tables, direction))
    return _figures(_medians(times), _medians(passes), num_blocks)


async def _published_s(pair: EnginePair, tables: PairedBlocks) -> float:
    began = time.perf_counter()
    await pair.fetch(await pair.publish(tables), tables)
    return time.perf_counter() - began


def _pass_s(tables: PairedBlocks, direction: Direction) -> float:
    """Seconds of a bare pass over the bytes, between blocks of a device and those of a ring."""
    num_blocks = len(tables.prefill)
    spec, (rank,) = BIG.spec("device"), BIG.ranks(2 * num_blocks)
    copy = block_copy([private_cache(spec, rank)])
    ring = torch.zeros(num_blocks, BIG.block_bytes, dtype=torch.uint8)
    blocks = HostBlocks(
        rank=0,
        group=GROUP,
        layers=rank.regions[0].layers,
        parts=rank.regions[0].parts,
        ids=tables.prefill.astype(np.uint32),
        slots=(0, BIG.block_size),
    )
    copy(blocks, ring, direction)  # every page is mapped from here on
    began = time.perf_counter()
    copy(blocks, ring, direction)
    return time.perf_counter() - began


def _medians(times: Mapping[K, list[float]]) -> dict[K, float]:
    return {name: median(seconds) for name, seconds in times.items()}


def _figures(
    times: Mapping[str, float], passes: Mapping[Direction, float], num_blocks: int
) -> list[Figure]:
    shared_s, num_bytes = times["shared to shared"], num_blocks * BIG.block_bytes
    save_s, load_s = passes[Direction.SAVE], passes[Direction.LOAD]
    allowed = {
        "host to shared": shared_s + save_s,
        "shared to host": shared_s + load_s,
        "host to host": shared_s + save_s + load_s,
    }
    return [
        *(
            Figure("host", f"{name}, of shared + passes", times[name] / limit, "", OF_TWO_PASSES)
            for name, limit in allowed.items()
        ),
        *(Figure("host", f"{name} p50", seconds * 1e3, "ms") for name, seconds in times.items()),
        *(
            Figure("host", f"a bare {direction}", num_bytes / seconds / 1e9, "GB/s")
            for direction, seconds in passes.items()
        ),
    ]
