"""Handoffs of KV that is not ready when it is asked for: computed in chunks, or saved into a ring.

A prefill here computes by waiting; a device is private memory, and its copies are timed alone too.
"""

import time
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

import numpy as np
import torch

from kvbus.bench.caches import block_copy, device_blocks
from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, speed
from kvbus.bench.shapes import BIG, BIG_HOST, GROUP, LAYERED, PairedBlocks, scattered
from kvbus.bench.stats import in_turn
from kvbus.engine.bounce import Direction, HostBlocks

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
    async with bench.engines(LAYERED, 2 * num_blocks) as pair:
        await pair.verify(tables)
        ways = {str(n): partial(_computed_s, pair, tables, n) for n in (1, NUM_CHUNKS)}
        times = await in_turn(scale.rounds, ways)
    whole_s, chunked_s = (median(seconds) for seconds in times.values())
    return [
        Figure("of the time without", chunked_s / whole_s, target=OF_WHOLE),
        milliseconds("end of prefill to end of fetch", chunked_s),
        milliseconds("the same without chunks", whole_s),
    ]


async def _computed_s(pair: EnginePair, tables: PairedBlocks, num_chunks: int) -> float:
    """From when the last chunk was ready until the fetch is complete.

    Both processes are on one machine, whose monotonic clock they share.
    """
    ticket = await pair.source.compute(tables, num_chunks, CHUNK_S * NUM_CHUNKS / num_chunks)
    await pair.fetch(ticket, tables)
    completed_at = time.perf_counter()
    ((ready_at, _),) = await pair.source.ended()
    return completed_at - ready_at


async def measure_host(bench: Bench, scale: Scale) -> list[Figure]:
    """64 MiB in scattered blocks, by each pair of memories in turn, and the bare copies."""
    num_blocks = scale.count(BIG_BLOCKS)
    tables = scattered(num_blocks, BIG)
    passes = {str(direction): partial(_pass_s, tables, direction) for direction in Direction}
    async with AsyncExitStack() as stack:
        ways = {}
        for name, (shape, target) in SIDES.items():
            source = await stack.enter_async_context(bench.source(shape, 2 * num_blocks))
            reader = bench.reader(target, 2 * num_blocks, source)
            pair = await stack.enter_async_context(reader)
            await pair.verify(tables)
            ways[name] = partial(_published_s, pair, tables)
        times = await in_turn(scale.rounds, {**ways, **passes})
    seconds = {name: median(one) for name, one in times.items()}
    shared_s, save_s, load_s = (seconds[n] for n in ("shared to shared", *Direction))
    allowed = {
        "host to shared": shared_s + save_s,
        "shared to host": shared_s + load_s,
        "host to host": shared_s + save_s + load_s,
    }
    return [
        *(
            Figure(f"{name}, of shared + passes", seconds[name] / limit, target=OF_TWO_PASSES)
            for name, limit in allowed.items()
        ),
        *(milliseconds(f"{name} p50", seconds[name]) for name in SIDES),
        *(speed(f"a bare {n}", num_blocks * BIG.block_bytes, seconds[n]) for n in Direction),
    ]


async def _published_s(pair: EnginePair, tables: PairedBlocks) -> float:
    began = time.perf_counter()
    await pair.hand_off(tables)
    took_s = time.perf_counter() - began
    await pair.source.ended()
    return took_s


async def _pass_s(tables: PairedBlocks, direction: Direction) -> float:
    """Seconds of a bare pass over the bytes, between blocks of a device and those of a ring."""
    num_blocks = len(tables.prefill)
    copy = block_copy(device_blocks(BIG, 2 * num_blocks))
    ring = torch.zeros(num_blocks, BIG.block_bytes, dtype=torch.uint8)
    blocks = HostBlocks(
        rank=0,
        group=GROUP,
        layers=tuple(range(BIG.num_layers)),
        parts=BIG.parts,
        ids=tables.prefill.astype(np.uint32),
        slots=(0, BIG.block_size),
    )
    copy(blocks, ring, direction)  # every page is mapped from here on
    began = time.perf_counter()
    copy(blocks, ring, direction)
    return time.perf_counter() - began
