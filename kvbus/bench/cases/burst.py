"""Very many one-block fetches, one right after the other: when the first ends, and the mean.

In turn with a decode agent that lets all of them begin at once.
"""

import time
from dataclasses import dataclass, field
from statistics import fmean, median

import anyio
import anyio.lowlevel

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds
from kvbus.bench.shapes import GROUP, SMALL, PairedBlocks, contiguous
from kvbus.engine import Fetch

NUM_FETCHES, ROUNDS = 2000, 5
NUM_BLOCKS = 256
"""The fetches share them: it matters how many go on at once, not what they write."""
FIRST = Target(15.0)


async def measure_burst(bench: Bench, scale: Scale) -> list[Figure]:
    """Bursts of both agents; times count from the first request of a burst."""
    num_fetches = scale.count(NUM_FETCHES)
    unbounded = bench.other_agent("unbounded")
    async with (
        bench.source(SMALL, NUM_BLOCKS) as source,
        bench.reader(SMALL, NUM_BLOCKS, source) as ours,
        bench.reader(SMALL, NUM_BLOCKS, source, agent=unbounded) as other,
    ):
        bursts, at_once = _Bursts(ours, num_fetches), _Bursts(other, num_fetches)
        for pair in (ours, other):
            await pair.verify(contiguous(1))
        for _ in range(scale.count(ROUNDS)):
            for one in (bursts, at_once):
                await one.measure()
    return [
        milliseconds("the first ends after", median(bursts.firsts_s), FIRST),
        milliseconds("mean", median(bursts.means_s)),
        milliseconds("the last ends after", median(bursts.lasts_s)),
        milliseconds("all begin at once: the first ends after", median(at_once.firsts_s)),
        milliseconds("all begin at once: mean", median(at_once.means_s)),
        milliseconds("all begin at once: the last ends after", median(at_once.lasts_s)),
        Figure("mean, of that", median(bursts.means_s) / median(at_once.means_s)),
        Figure("fetches", num_fetches),
    ]


@dataclass(slots=True)
class _Bursts:
    """Seconds from the first request of each burst to the first end, the mean, the last end."""

    pair: EnginePair
    num_fetches: int
    firsts_s: list[float] = field(default_factory=list)
    means_s: list[float] = field(default_factory=list)
    lasts_s: list[float] = field(default_factory=list)

    async def measure(self) -> None:
        tables = [_one_block(number % NUM_BLOCKS) for number in range(self.num_fetches)]
        tickets = await self.pair.source.offer(*tables)
        ended_s: list[float] = []
        began = time.perf_counter()

        async def end(fetch: Fetch) -> None:
            await fetch.ended
            ended_s.append(time.perf_counter() - began)

        async with anyio.create_task_group() as tasks:
            for ticket, one in zip(tickets, tables, strict=True):
                block_ids = {GROUP: one.decode}
                fetch = self.pair.session.fetch(
                    ticket, num_tokens=one.num_tokens, block_ids=block_ids
                )
                tasks.start_soon(end, fetch)
                await anyio.lowlevel.checkpoint()  # the engine hears what has ended meanwhile
        await self.pair.source.ended()
        self.firsts_s.append(min(ended_s))
        self.means_s.append(fmean(ended_s))
        self.lasts_s.append(max(ended_s))


def _one_block(block: int) -> PairedBlocks:
    one = contiguous(1)
    return PairedBlocks(one.prefill + block, one.decode + block, one.num_tokens)
