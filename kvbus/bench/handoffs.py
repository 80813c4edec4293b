"""Handoffs one at a time, each kind in turn with its limit: bare NIXL, a memcpy, bare processes.

A prefill here computes by waiting; a device is private memory, and its copies are timed alone too.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

import numpy as np
import torch

from kvbus.bench.engine import block_copy, device_blocks
from kvbus.bench.figures import (
    Figure,
    Scale,
    Target,
    in_turn,
    milliseconds,
    quantile,
    speed,
)
from kvbus.bench.floor import floor
from kvbus.bench.pairs import UNMAPPED, Bench, Pair
from kvbus.bench.processes import bare_pair
from kvbus.bench.shapes import (
    BIG,
    BIG_HOST,
    GROUP,
    LAYERED,
    SMALL,
    PairedBlocks,
    Shape,
    contiguous,
    direct_descriptors,
    scattered,
    scattered_tokens,
)
from kvbus.engine.bounce import Direction, HostBlocks
from kvbus.lab.process import Taken

MIB = 1 << 20
NUM_BYTES = 64 * MIB
NUM_SMALL = 1000
FIXED, OF_FLOOR, OF_FLOOR_P99 = Target(1.0), Target(2.0), Target(3.0)
STAGES = ("resolving", "queued", "claiming", "waiting", "reading", "taking")
OTHERS = ("mapped", UNMAPPED, "direct", "packed")
OF_EQUAL = Target(0.7, at_least=True)
OF_BEST = Target(1 / 1.2, at_least=True)
NUM_CHUNKS, CHUNK_S = 8, 0.03
OF_WHOLE = Target(0.5)
OF_TWO_PASSES = Target(1.0)
SIDES = {
    "shared to shared": (BIG, BIG),
    "host to shared": (BIG_HOST, BIG),
    "shared to host": (BIG, BIG_HOST),
    "host to host": (BIG_HOST, BIG_HOST),
}

Ways = Mapping[str, Callable[[], Awaitable[float]]]


async def measure_transfer(
    bench: Bench,
    scale: Scale,
    *,
    shape: Shape,
    num_mib: int,
    blocks: Callable[[int, Shape], PairedBlocks],
    of_raw: float,
    unmapped: float,
) -> list[Figure]:
    """In turn, a bare READ of the same descriptors, a handoff, and one without mapped memory.

    ``of_raw`` and ``unmapped`` are the speeds that the latter shall have at least, of the READ's.
    """
    tables = blocks(scale.count(num_mib * MIB // shape.block_bytes), shape)
    rows, size_bytes = direct_descriptors(shape, shape, tables)
    with bare_pair(rows, size_bytes, bench.folder) as raw:
        num_blocks, other = tables.capacities[0], bench.other_agent(UNMAPPED)
        async with (
            bench.pair(shape, num_blocks) as pair,
            bench.reader(shape, num_blocks, pair.source, agent=other) as far,
        ):
            await raw.read_s(b"verify")
            for one in (pair, far):
                await one.verify(tables)
            ways: Ways = {
                "raw": raw.read_s,
                "kvbus": partial(pair.timed, tables),
                UNMAPPED: partial(far.timed, tables),
            }
            times = await in_turn(scale.rounds, ways)
    seconds = {name: median(some) for name, some in times.items()}
    of_medians = {name: seconds["raw"] / some for name, some in seconds.items()}
    copy_s = _copy_s(rows.num_bytes, scale.rounds)
    targets = Target(of_raw, at_least=True), Target(unmapped, at_least=True)
    return [
        Figure("of raw speed, medians", of_medians["kvbus"], target=targets[0]),
        Figure("unmapped, of raw speed, medians", of_medians[UNMAPPED], target=targets[1]),
        *(speed(name, rows.num_bytes, some) for name, some in seconds.items()),
        speed("memcpy", rows.num_bytes, copy_s),
        Figure("kvbus of memcpy", copy_s / seconds["kvbus"]),
        Figure("descriptors", len(rows.local)),
        *(milliseconds(f"{name} p50", some) for name, some in seconds.items()),
        *_stage_figures(pair.fetches),
        milliseconds("offer to released p50", median(pair.released_s)),
    ]


async def measure_fixed(bench: Bench, scale: Scale) -> list[Figure]:
    """What a handoff of next to nothing costs: one block, after the one before was released.

    In turn with the bare processes of `floor`.
    """
    async with floor(bench.folder) as bare, bench.pair(SMALL, 2) as pair:
        await pair.verify(contiguous(1))
        ways: Ways = {"floor": bare.hand_off, "handoff": partial(pair.timed, contiguous(1))}
        times = await in_turn(scale.count(NUM_SMALL), ways)
    p50, p99 = ({name: quantile(some, q) for name, some in times.items()} for q in (0.5, 0.99))
    return [
        milliseconds("handoff p50", p50["handoff"], FIXED),
        milliseconds("handoff p99", p99["handoff"]),
        milliseconds("floor p50", p50["floor"]),
        milliseconds("floor p99", p99["floor"]),
        Figure("of the floor, p50", p50["handoff"] / p50["floor"], target=OF_FLOOR),
        Figure("of the floor, p99", p99["handoff"] / p99["floor"], target=OF_FLOOR_P99),
        *_stage_figures(pair.fetches),
        milliseconds("offer to released p50", quantile(pair.released_s, 0.5)),
        milliseconds("offer to released p99", quantile(pair.released_s, 0.99)),
        Figure("handoffs", len(times["handoff"])),
    ]


def _stage_figures(fetches: Sequence[Taken]) -> list[Figure]:
    """Medians of the agent's stages; what no stage has is between engine and agent."""
    stages = [[getattr(one.fetched.stages_s, stage) for stage in STAGES] for one in fetches]
    outside = [one.seconds - sum(times) for one, times in zip(fetches, stages, strict=True)]
    by_stage = [*zip(*stages, strict=True), outside]
    return [
        milliseconds(f"  {name} p50", median(times))
        for name, times in zip((*STAGES, "engine to agent"), by_stage, strict=True)
    ]


async def measure_reshape(
    bench: Bench,
    scale: Scale,
    *,
    source: Shape,
    target: Shape,
    of_naive: float | None = None,
    packed_of_naive: float | None = None,
) -> list[Figure]:
    """64 MiB in scattered blocks: a READ of all runs, each path, and a handoff of equal engines.

    ``of_naive`` and ``packed_of_naive`` are the speeds that the agent's choice and the packed path
    shall have at least, of the READ's.
    """
    num_tokens = scale.count(NUM_BYTES // target.token_bytes, at_least=source.block_size)
    tables = scattered_tokens(source, target, num_tokens)
    num_source, num_target = tables.capacities
    rows, size_bytes = direct_descriptors(source, target, tables)
    async with AsyncExitStack() as stack:
        raw = stack.enter_context(bare_pair(rows, size_bytes, bench.folder))
        engine = await stack.enter_async_context(bench.source(source, num_source))
        pairs = {"equal": await stack.enter_async_context(bench.pair(target, num_target))}
        for label in ("auto", *OTHERS):
            agent = bench.other_agent(label) if label in OTHERS else None
            reader = bench.reader(target, num_target, engine, agent=agent)
            pairs[label] = await stack.enter_async_context(reader)
        ways = {"naive": raw.read_s}
        for name, pair in pairs.items():
            blocks = scattered_tokens(pair.source.shape, target, num_tokens)
            await pair.verify(blocks)
            ways[name] = partial(pair.timed, blocks)
        times = await in_turn(scale.rounds, ways)
    num_bytes = num_tokens * target.token_bytes
    seconds = {name: median(one) for name, one in times.items()}
    unmapped_s = min(seconds["direct"], seconds["packed"])
    best_s = min(seconds["mapped"], unmapped_s)
    with_memcpy = {**seconds, "memcpy": _copy_s(num_bytes, scale.rounds)}
    return [
        Figure("auto of naive", seconds["naive"] / seconds["auto"], target=_at_least(of_naive)),
        Figure("auto of equal shapes", seconds["equal"] / seconds["auto"], target=OF_EQUAL),
        Figure("auto of the best path", best_s / seconds["auto"], target=OF_BEST),
        Figure("unmapped, of its best path", unmapped_s / seconds[UNMAPPED], target=OF_BEST),
        Figure(
            "packed of naive",
            seconds["naive"] / seconds["packed"],
            target=_at_least(packed_of_naive),
        ),
        Figure("direct of naive", seconds["naive"] / seconds["direct"]),
        *(speed(f"  {name}", num_bytes, some) for name, some in with_memcpy.items()),
        *(milliseconds(f"  {name} p50", some) for name, some in seconds.items()),
        Figure("naive descriptors", len(rows.local)),
    ]


def _at_least(limit: float | None) -> Target | None:
    return None if limit is None else Target(limit, at_least=True)


def _copy_s(num_bytes: int, rounds: int) -> float:
    """Median seconds of a memcpy whose memory has been touched before."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    target[:] = 1
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return median(times)


async def measure_chunked(bench: Bench, scale: Scale) -> list[Figure]:
    """In turn: a prefill of one chunk, and one of eight."""
    num_blocks = scale.count(NUM_BYTES // LAYERED.block_bytes, at_least=NUM_CHUNKS)
    tables = scattered(num_blocks, LAYERED)
    async with bench.pair(LAYERED, 2 * num_blocks) as pair:
        await pair.verify(tables)
        ways = {str(n): partial(_computed_s, pair, tables, n) for n in (1, NUM_CHUNKS)}
        times = await in_turn(scale.rounds, ways)
    whole_s, chunked_s = (median(seconds) for seconds in times.values())
    return [
        Figure("of the time without", chunked_s / whole_s, target=OF_WHOLE),
        milliseconds("end of prefill to end of fetch", chunked_s),
        milliseconds("the same without chunks", whole_s),
    ]


async def _computed_s(pair: Pair, tables: PairedBlocks, num_chunks: int) -> float:
    """From when the last chunk was ready until the fetch is complete.

    Both processes are on one machine, whose monotonic clock they share.
    """
    ticket = await pair.source.compute(tables, num_chunks, CHUNK_S * NUM_CHUNKS / num_chunks)
    fetch = await pair.fetch(ticket, tables)
    ((ready_at, _),) = await pair.source.ended()
    return fetch.at_s - ready_at


async def measure_host(bench: Bench, scale: Scale) -> list[Figure]:
    """64 MiB in scattered blocks, by each pair of memories in turn, and the bare copies."""
    num_blocks = scale.count(NUM_BYTES // BIG.block_bytes)
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


async def _published_s(pair: Pair, tables: PairedBlocks) -> float:
    """From the request to offer until the fetch is complete."""
    began = time.monotonic()
    fetch = await pair.hand_off(tables)
    await pair.source.ended()
    return fetch.at_s - began


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
