"""How long an urgent handoff takes while 1 GiB of others is in flight, beside how long alone."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.abc
import numpy as np

from kvbus.bench.engines import UNMAPPED, Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, speed
from kvbus.bench.shapes import BIG, PairedBlocks
from kvbus.bench.stats import quantile

MIB = 1 << 20
NUM_LARGE = 4
LARGE_BLOCKS = 256 * MIB // BIG.block_bytes
URGENT_BLOCKS = 64 * MIB // BIG.block_bytes
EACH_TIME = 4
"""Handoffs that are measured in each turn, one after the other."""
WAYS = {"alone": None, "beside, as urgent": 0, "beside, urgent": 1}
"""The priority of what is measured; the others have 0, if there are any."""
QUANTILES = {"p50": 0.5, "p99": 0.99}
TARGETS = {("beside, urgent", "p99"): Target(1.5)}


async def measure_priority(bench: Bench, scale: Scale) -> list[Figure]:
    """64 MiB alone, beside 1 GiB, and urgent beside it, in turns; mapped, and over NIXL."""
    large, urgent = scale.count(LARGE_BLOCKS), scale.count(URGENT_BLOCKS)
    num_blocks = NUM_LARGE * large + urgent
    figures: list[Figure] = []
    async with bench.source(BIG, num_blocks) as source:
        for name, agent in {"mapped": None, UNMAPPED: bench.other_agent(UNMAPPED)}.items():
            async with bench.reader(BIG, num_blocks, source, agent=agent) as pair:
                await pair.verify(_stretch(0, num_blocks))
                figures += await _measure(name, pair, large, urgent, scale.rounds)
    return figures


async def _measure(
    name: str, pair: EnginePair, large: int, urgent: int, rounds: int
) -> list[Figure]:
    load = _Load(pair, large)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, priority in WAYS.items():
            async with load.running(0 if priority is None else NUM_LARGE):
                for _ in range(EACH_TIME):
                    tables = _stretch(NUM_LARGE * large, urgent)
                    fetched = await pair.hand_off(tables, priority=priority or 0)
                    times[way].append(fetched.seconds)
    of_alone = [
        (way, text, quantile(times[way], fraction) / quantile(times["alone"], fraction))
        for way in times
        for text, fraction in QUANTILES.items()
        if way != "alone"
    ]
    return [
        *[
            milliseconds(f"{name}: {way} {text}", quantile(some, fraction))
            for way, some in times.items()
            for text, fraction in QUANTILES.items()
        ],
        *[
            Figure(f"{name}: {way} {text}, of alone", ratio, "", TARGETS.get((way, text)))
            for way, text, ratio in of_alone
        ],
        speed(f"{name}: the others meanwhile", load.num_bytes, load.seconds),
    ]


def _stretch(first_block: int, num_blocks: int) -> PairedBlocks:
    """The same blocks on both sides, in another order than they lie, so that no runs merge."""
    blocks = np.random.default_rng(first_block).permutation(num_blocks) + first_block
    return PairedBlocks(blocks, blocks[::-1].copy(), num_blocks * BIG.block_size)


@dataclass(slots=True)
class _Load:
    """Large fetches that go on beside what is measured."""

    pair: EnginePair
    num_blocks: int
    num_bytes: int = 0
    seconds: float = 0.0

    @asynccontextmanager
    async def running(self, num: int) -> AsyncIterator[None]:
        """So many at a time; they have begun, and have ended after it."""
        began, stop = time.perf_counter(), anyio.Event()
        async with anyio.create_task_group() as tasks:
            for part in range(num):
                await tasks.start(self._repeat, part, stop)
            yield
            stop.set()
        if num:
            self.seconds += time.perf_counter() - began

    async def _repeat(
        self,
        part: int,
        stop: anyio.Event,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        tables = _stretch(part * self.num_blocks, self.num_blocks)
        (ticket,) = await self.pair.source.offer(tables)
        task_status.started()
        await self.pair.fetch(ticket, tables)
        self.num_bytes += self.num_blocks * BIG.block_bytes
        while not stop.is_set():
            await self.pair.hand_off(tables)
            self.num_bytes += self.num_blocks * BIG.block_bytes
