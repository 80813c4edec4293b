"""What many handoffs do to the agents: rate and CPU, what they hear meanwhile, what they keep.

And what they cost when there are none.
"""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import median

import anyio
import numpy as np
from anyio.abc import TaskStatus

from kvbus.bench.engine import Ticket
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, quantile, speed
from kvbus.bench.floor import floor
from kvbus.bench.pairs import UNMAPPED, Bench, Pair
from kvbus.bench.processes import BenchAgent
from kvbus.bench.shapes import (
    BIG,
    SMALL,
    TINY_RUNS,
    PairedBlocks,
    Shape,
    contiguous,
    scattered,
)
from kvbus.bus import RequestClient, new_boot_id, new_context
from kvbus.histograms import added_counts, histogram_quantile
from kvbus.protocol.engine import Ping

MIB = 1 << 20
NUM_LARGE = 4
LARGE_BLOCKS = 256 * MIB // BIG.block_bytes
"""Of each of the fetches that are in flight beside what is measured."""

LOAD_S = 15.0
PING_EVERY_S = 0.01
LAG, BESIDE = Target(10.0), Target(15.0)

URGENT_BLOCKS = 64 * MIB // BIG.block_bytes
EACH_TIME = 4
"""Handoffs that are measured in each turn, one after the other."""
WAYS = {"alone": None, "beside, as urgent": 0, "beside, urgent": 1}
"""The priority of what is measured; the others have 0, if there are any."""
QUANTILES = {"p50": 0.5, "p99": 0.99}
URGENT_OF_ALONE = {("beside, urgent", "p99"): Target(1.5)}

CONCURRENCY = 64
OFFERS_AT_ONCE = 32
WARM_UP_S, RATE_S = 1.0, 10.0
A_SECOND, AGENTS_US = Target(1000, at_least=True), Target(300)

CALM_S, IDLE_S = 1.0, 20.0
OF_A_CORE = Target(1.0)

NUM_DESCRIPTORS = 81_920
NUM_GROWING, NUM_GROWN = 100, 10
GROWTH_BYTES = Target(64 << 10)

VERY_BIG_BLOCKS = (4 << 30) // BIG.block_bytes
NUM_RUNS, NUM_FETCHES = 655_360, 5
LAG_OF_LARGE = Target(20.0)


@dataclass(slots=True)
class Flood:
    """Large fetches that go on beside what is measured."""

    num_bytes: int = 0
    seconds: float = 0.0

    @asynccontextmanager
    async def running(self, pair: Pair, tables: Sequence[PairedBlocks]) -> AsyncIterator[None]:
        """One at a time of each of ``tables``; they have begun, and have ended after it."""
        began, stop = time.perf_counter(), anyio.Event()
        async with anyio.create_task_group() as tasks:
            for one in tables:
                await tasks.start(self._repeat, pair, one, stop)
            yield
            stop.set()
        if tables:
            self.seconds += time.perf_counter() - began

    async def _repeat(
        self,
        pair: Pair,
        tables: PairedBlocks,
        stop: anyio.Event,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        (ticket,) = await pair.source.offer(tables)
        task_status.started()
        while True:
            await pair.fetch(ticket, tables)
            self.num_bytes += len(tables.decode) * pair.reader.shape.block_bytes
            if stop.is_set():
                return
            (ticket,) = await pair.source.offer(tables)


async def measure_load(bench: Bench, scale: Scale) -> list[Figure]:
    """One-block handoffs and pings, one after the other, while 1 GiB is in flight."""
    num_blocks = scale.count(LARGE_BLOCKS)
    parts = [
        scattered(num_blocks, first_block=2 * part * num_blocks, seed=part)
        for part in range(NUM_LARGE)
    ]
    beside_s: list[float] = []
    async with (
        bench.pair(BIG, 2 * NUM_LARGE * num_blocks) as large,
        bench.pair(SMALL, 2) as small,
    ):
        await large.verify(parts[0])
        await small.verify(contiguous(1))
        (ticket,) = await small.source.offer(contiguous(1))
        await small.fetch(ticket, contiguous(1))
        endpoints = ticket["endpoint"], small.reader.link.agent.peer_endpoint
        flood, stop = Flood(), anyio.Event()
        heard = [
            Heard(name, agent, endpoint, agent.lag_counts())
            for (name, agent), endpoint in zip(bench.agents.items(), endpoints, strict=True)
        ]
        async with flood.running(large, parts), anyio.create_task_group() as tasks:
            for one in heard:
                tasks.start_soon(one.ping, stop)
            began, num_before = time.perf_counter(), flood.num_bytes
            ends = began + scale.seconds(LOAD_S)
            while time.perf_counter() < ends or not all(one.pings_s for one in heard):
                beside_s.append((await small.hand_off(contiguous(1))).seconds)
            num_bytes, took_s = flood.num_bytes - num_before, time.perf_counter() - began
            figures = [figure for one in heard for figure in await one.figures()]
            stop.set()
    return [
        *figures,
        milliseconds("one block beside it p50", quantile(beside_s, 0.5)),
        milliseconds("one block beside it p99", quantile(beside_s, 0.99), BESIDE),
        Figure("one block handoffs", len(beside_s)),
        speed("large fetches", num_bytes, took_s),
    ]


@dataclass(slots=True)
class Heard:
    """What an agent hears: pings, and the lag of its event loop since ``before``."""

    name: str
    agent: BenchAgent
    endpoint: str
    before: dict[float, float]
    pings_s: list[float] = field(default_factory=list)

    async def ping(self, stop: anyio.Event) -> None:
        """Ping until it shall ``stop``; the first one connects."""
        with new_context() as context:
            client = RequestClient(context, self.endpoint, boot=new_boot_id())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.run)
                await client.ask(Ping(), timeout_s=5)
                while not stop.is_set():
                    began = time.perf_counter()
                    await client.ask(Ping(), timeout_s=5)
                    self.pings_s.append(time.perf_counter() - began)
                    await anyio.sleep(PING_EVERY_S)
                tasks.cancel_scope.cancel()

    async def figures(self) -> list[Figure]:
        """An agent that was slow to count its lag is awaited."""
        added: dict[float, float] = {}
        while not any(added.values()):
            await anyio.sleep(PING_EVERY_S)
            added = added_counts(self.before, self.agent.lag_counts())
        return [
            milliseconds(f"{self.name} loop lag p99", histogram_quantile(added, 0.99), LAG),
            *(
                milliseconds(f"{self.name} ping {text}", quantile(self.pings_s, fraction))
                for text, fraction in QUANTILES.items()
            ),
        ]


async def measure_priority(bench: Bench, scale: Scale) -> list[Figure]:
    """64 MiB alone, beside 1 GiB, and urgent beside it, in turns; mapped, and over NIXL."""
    num_large, num_urgent = scale.count(LARGE_BLOCKS), scale.count(URGENT_BLOCKS)
    parts = [_shuffled(part * num_large, num_large) for part in range(NUM_LARGE)]
    urgent = _shuffled(NUM_LARGE * num_large, num_urgent)
    num_blocks = NUM_LARGE * num_large + num_urgent
    figures: list[Figure] = []
    async with bench.source(BIG, num_blocks) as source:
        for name, agent in {"mapped": None, UNMAPPED: bench.other_agent(UNMAPPED)}.items():
            async with bench.reader(BIG, num_blocks, source, agent=agent) as pair:
                await pair.verify(_shuffled(0, num_blocks))
                found = await _beside(pair, parts, urgent, rounds=scale.rounds)
                figures += [replace(one, name=f"{name}: {one.name}") for one in found]
    return figures


async def _beside(
    pair: Pair, parts: list[PairedBlocks], urgent: PairedBlocks, *, rounds: int
) -> list[Figure]:
    flood, times = Flood(), {way: list[float]() for way in WAYS}
    for _ in range(rounds):
        for way, priority in WAYS.items():
            async with flood.running(pair, [] if priority is None else parts):
                for _ in range(EACH_TIME):
                    fetch = await pair.hand_off(urgent, priority=priority or 0)
                    times[way].append(fetch.seconds)
    found = {
        (way, text): quantile(some, fraction)
        for way, some in times.items()
        for text, fraction in QUANTILES.items()
    }
    return [
        *(milliseconds(f"{way} {text}", some) for (way, text), some in found.items()),
        *(
            Figure(
                f"{way} {text}, of alone",
                some / found["alone", text],
                target=URGENT_OF_ALONE.get((way, text)),
            )
            for (way, text), some in found.items()
            if way != "alone"
        ),
        speed("the others meanwhile", flood.num_bytes, flood.seconds),
    ]


def _shuffled(first_block: int, num_blocks: int) -> PairedBlocks:
    """The same blocks on both sides, in another order than they lie, so that no runs merge."""
    blocks = np.random.default_rng(first_block).permutation(num_blocks) + first_block
    return PairedBlocks(blocks, blocks[::-1].copy(), num_blocks * BIG.block_size)


async def measure_rate(bench: Bench, scale: Scale) -> list[Figure]:
    """One-block handoffs, 64 at a time, and what each costs in CPU; `floor` before.

    Warm up, then count both over the same stretch.
    """
    async with floor(bench.folder) as bare:
        bare_rate, bare_s = await bare.rate(CONCURRENCY, scale.seconds(WARM_UP_S))
    async with bench.pair(SMALL, 8 * CONCURRENCY) as pair:
        await pair.verify(contiguous(1))
        rate = Rate(pair)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.reader.run, rate.work())
            tasks.start_soon(rate.offer)
            await anyio.sleep(scale.seconds(WARM_UP_S))
            before, rate.counts_from = bench.cpu_s(), time.monotonic()
            await anyio.sleep(scale.seconds(RATE_S))
            await asyncio.wrap_future(rate.any_counted)
            rate.is_over = True
            after, elapsed_s = bench.cpu_s(), time.monotonic() - rate.counts_from
        await pair.source.ended()
    num, cpu_s = len(rate.seconds), {name: after[name] - before[name] for name in after}
    agents_s = sum(cpu_s[name] for name in bench.agents) / num
    return [
        Figure("handoffs", num / elapsed_s, "1/s", A_SECOND),
        milliseconds("handoff p50", quantile(rate.seconds, 0.5)),
        milliseconds("handoff p99", quantile(rate.seconds, 0.99)),
        *(Figure(f"{name} CPU", s / num * 1e6, "µs a handoff") for name, s in cpu_s.items()),
        Figure("both agents CPU", agents_s * 1e6, "µs a handoff", AGENTS_US),
        Figure("floor handoffs", bare_rate, "1/s"),
        Figure("floor agents CPU", bare_s * 1e6, "µs a handoff"),
        Figure("of the floor, CPU of both agents", agents_s / bare_s),
    ]


@dataclass(slots=True)
class Rate:
    """Handoffs by many workers until it is over; only those after ``counts_from`` count."""

    pair: Pair
    counts_from: float = math.inf
    is_over: bool = False
    seconds: list[float] = field(default_factory=list)
    any_counted: "Future[None]" = field(default_factory=Future)
    _offered: "asyncio.Queue[tuple[Ticket, PairedBlocks] | None]" = field(
        default_factory=lambda: asyncio.Queue(2 * OFFERS_AT_ONCE)
    )

    async def offer(self) -> None:
        """Offer blocks, many at once, as fast as they are fetched."""
        blocks = cycle(scattered(4 * CONCURRENCY).prefill)
        while not self.is_over:
            batch = [_one_block(next(blocks)) for _ in range(OFFERS_AT_ONCE)]
            tickets = await self.pair.source.offer(*batch)
            await self.pair.reader.run(self._put([*zip(tickets, batch, strict=True)]))
        await self.pair.reader.run(self._put([None] * CONCURRENCY))

    async def _put(self, offered: Sequence[tuple[Ticket, PairedBlocks] | None]) -> None:
        for one in offered:
            await self._offered.put(one)

    async def work(self) -> None:
        """Fetch what is offered; in the thread of the decode engine's link, as `_put`."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENCY):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while (offered := await self._offered.get()) is not None:
            taken = await self.pair.reader.take(*offered)
            if self.counts_from <= taken.at_s and not self.is_over:
                self.seconds.append(taken.seconds)
                if not self.any_counted.done():
                    self.any_counted.set_result(None)


def _one_block(block: int) -> PairedBlocks:
    one = contiguous(1)
    return PairedBlocks(one.prefill + block, one.decode + block, one.num_tokens)


async def measure_idle(bench: Bench, scale: Scale) -> list[Figure]:
    """CPU time of the agents over a while without work: engines attached, peers warm."""
    duration_s = scale.seconds(IDLE_S)
    async with bench.pair(SMALL, 2) as pair:
        await pair.verify(contiguous(1))
        await anyio.sleep(CALM_S)
        before = bench.cpu_s()
        await anyio.sleep(duration_s)
        after = bench.cpu_s()
    shares = {name: (after[name] - before[name]) / duration_s * 100 for name in bench.agents}
    return [Figure(f"{name} CPU", n, "% of a core", OF_A_CORE) for name, n in shares.items()]


async def measure_memory(bench: Bench, scale: Scale) -> list[Figure]:
    """Growth of the decode agent's anonymous memory over many direct fetches of many descriptors.

    After some that fill caches and pools.
    """
    num_blocks = scale.count(NUM_DESCRIPTORS // TINY_RUNS.num_layers)
    tables, num_fetches = scattered(num_blocks, TINY_RUNS), scale.count(NUM_GROWING)
    direct = bench.other_agent("direct")
    async with (
        bench.source(TINY_RUNS, 2 * num_blocks) as source,
        bench.reader(TINY_RUNS, 2 * num_blocks, source, agent=direct) as pair,
    ):
        for _ in range(NUM_GROWN):
            await pair.timed(tables)
        before = _anonymous_bytes(direct.child.pid)
        for _ in range(num_fetches):
            await pair.timed(tables)
        await pair.verify(tables)
        after = _anonymous_bytes(direct.child.pid)
    return [
        Figure("growth", (after - before) / num_fetches, "bytes a fetch", GROWTH_BYTES),
        Figure("before", before / 1e6, "MB"),
        Figure("after", after / 1e6, "MB"),
        Figure("descriptors", num_blocks * TINY_RUNS.num_layers),
        Figure("fetches", num_fetches),
    ]


def _anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own, neither a file's nor shared."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


async def measure_large(bench: Bench, scale: Scale) -> list[Figure]:
    """4 GiB in one run, then 655,360 runs of 512 bytes; each mapped, and not.

    How long they hold the agents' loops.
    """
    num_big = scale.count(VERY_BIG_BLOCKS)
    num_tiny = scale.count(NUM_RUNS // TINY_RUNS.num_layers)
    whole, many = contiguous(num_big), scattered(num_tiny, TINY_RUNS)
    return [
        *await _large(bench, "4 GiB", BIG, whole, num_blocks=num_big),
        *await _large(bench, "655,360 runs", TINY_RUNS, many, num_blocks=2 * num_tiny),
    ]


async def _large(
    bench: Bench, name: str, shape: Shape, tables: PairedBlocks, *, num_blocks: int
) -> list[Figure]:
    figures: list[Figure] = []
    near, far = bench.agents["decode agent"], bench.other_agent(UNMAPPED)
    async with bench.source(shape, num_blocks) as source:
        for way, agent in {"mapped": near, UNMAPPED: far}.items():
            async with bench.reader(shape, num_blocks, source, agent=agent) as pair:
                await pair.verify(tables)
                agents = {**bench.agents, "decode agent": agent}
                figures += await _fetches(f"{name}, {way}", pair, tables, agents)
    return figures


async def _fetches(
    name: str, pair: Pair, tables: PairedBlocks, agents: Mapping[str, BenchAgent]
) -> list[Figure]:
    before = {role: agent.lag_counts() for role, agent in agents.items()}
    seconds = [await pair.timed(tables) for _ in range(NUM_FETCHES)]
    lags = {role: added_counts(before[role], one.lag_counts()) for role, one in agents.items()}
    return [
        milliseconds(f"{name}: p50", median(seconds)),
        *(
            milliseconds(
                f"{name}: {role} loop lag p99", histogram_quantile(lag, 0.99), LAG_OF_LARGE
            )
            for role, lag in lags.items()
            if any(lag.values())
        ),
    ]
