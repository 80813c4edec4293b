"""How many one-block handoffs a second go through, 64 at a time, and what each costs in CPU."""

import math
import time
from dataclasses import dataclass, field
from itertools import cycle

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kvbus.bench.engines import Bench, EnginePair, Ticket
from kvbus.bench.figures import Figure, Scale, Target, milliseconds
from kvbus.bench.floor import floor
from kvbus.bench.shapes import SMALL, PairedBlocks, contiguous, scattered
from kvbus.bench.stats import quantile

CONCURRENCY = 64
OFFERS_AT_ONCE = 32
WARM_UP_S = 1.0
DURATION_S = 10.0
A_SECOND = Target(1000, at_least=True)
AGENTS_US = Target(300)

Offered = tuple[Ticket, PairedBlocks]


async def measure_rate(bench: Bench, scale: Scale) -> list[Figure]:
    """Warm up, then count handoffs and CPU time over the same stretch; of `floor` before."""
    async with floor(bench.folder) as bare:
        bare_rate, bare_s = await bare.rate(CONCURRENCY, scale.seconds(WARM_UP_S))
    async with bench.engines(SMALL, 8 * CONCURRENCY) as pair:
        await pair.verify(contiguous(1))
        rate = _Rate(pair)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rate.run)
            await anyio.sleep(scale.seconds(WARM_UP_S))
            before, began = bench.cpu_s(), time.perf_counter()
            rate.counts_from = began
            await anyio.sleep(scale.seconds(DURATION_S))
            await rate.any_counted.wait()
            rate.is_over = True
            after, elapsed_s = bench.cpu_s(), time.perf_counter() - began
        await pair.source.ended()
    num = len(rate.latencies_s)
    agents_s = sum(after[name] - before[name] for name in bench.agents) / num
    return [
        Figure("handoffs", num / elapsed_s, "1/s", A_SECOND),
        milliseconds("handoff p50", quantile(rate.latencies_s, 0.5)),
        milliseconds("handoff p99", quantile(rate.latencies_s, 0.99)),
        *(
            Figure(f"{name} CPU", (after[name] - before[name]) / num * 1e6, "µs a handoff")
            for name in before
        ),
        Figure("both agents CPU", agents_s * 1e6, "µs a handoff", AGENTS_US),
        Figure("floor handoffs", bare_rate, "1/s"),
        Figure("floor agents CPU", bare_s * 1e6, "µs a handoff"),
        Figure("of the floor, CPU of both agents", agents_s / bare_s),
    ]


@dataclass(slots=True)
class _Rate:
    """Handoffs by many workers until it is over; only those after ``counts_from`` count."""

    pair: EnginePair
    counts_from: float = math.inf
    is_over: bool = False
    latencies_s: list[float] = field(default_factory=list)
    any_counted: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        send, receive = anyio.create_memory_object_stream[Offered](2 * OFFERS_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._offer, send)
            for _ in range(CONCURRENCY):
                tasks.start_soon(self._work, receive.clone())
            receive.close()

    async def _offer(self, send: MemoryObjectSendStream[Offered]) -> None:
        blocks = cycle(scattered(4 * CONCURRENCY).prefill)
        async with send:
            while not self.is_over:
                batch = [_one_block(next(blocks)) for _ in range(OFFERS_AT_ONCE)]
                tickets = await self.pair.source.offer(*batch)
                for offered in zip(tickets, batch, strict=True):
                    await send.send(offered)

    async def _work(self, receive: MemoryObjectReceiveStream[Offered]) -> None:
        async with receive:
            async for ticket, tables in receive:
                handoff = await self.pair.fetch(ticket, tables)
                if self.counts_from <= time.perf_counter() and not self.is_over:
                    self.latencies_s.append(handoff.seconds)
                    self.any_counted.set()


def _one_block(block: int) -> PairedBlocks:
    one = contiguous(1)
    return PairedBlocks(one.prefill + block, one.decode + block, one.num_tokens)
