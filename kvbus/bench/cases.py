"""The cases of ``kvbus bench`` and their run; here are those of many handoffs at once, or of none.

Agents and engines up, the cases in turn, everything down.
"""

import asyncio
import math
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

import anyio
import numpy as np
from anyio.abc import TaskStatus

from kvbus.bench.engine import Ticket
from kvbus.bench.figures import CaseName, Figure, Scale, Target, milliseconds, quantile, speed
from kvbus.bench.floor import floor
from kvbus.bench.handoffs import (
    measure_chunked,
    measure_fixed,
    measure_host,
    measure_reshape,
    measure_transfer,
)
from kvbus.bench.pairs import UNMAPPED, Bench, Pair, running
from kvbus.bench.processes import BenchAgent
from kvbus.bench.shapes import (
    BIG,
    HND_1,
    LAYERED,
    MLA_1,
    MLA_2,
    NHD_1,
    NHD_2,
    NHD_64,
    SMALL,
    TINY_RUNS,
    PairedBlocks,
    Shape,
    contiguous,
    scattered,
)
from kvbus.errors import KVBusError
from kvbus.histograms import added_counts, histogram_quantile

Show = Callable[[CaseName, Sequence[Figure]], None]

MIB = 1 << 20
NUM_LARGE = 4
LARGE_BLOCKS = 256 * MIB // BIG.block_bytes
"""Of each of the fetches that are in flight beside what is measured."""

LOAD_S = 15.0
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
    """One-block handoffs, one after the other, while 1 GiB is in flight."""
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
        flood, lags = Flood(), Lags(bench.agents)
        async with flood.running(large, parts):
            began, num_before = time.perf_counter(), flood.num_bytes
            ends = began + scale.seconds(LOAD_S)
            while time.perf_counter() < ends or not lags.are_counted:
                beside_s.append((await small.hand_off(contiguous(1))).seconds)
            num_bytes, took_s = flood.num_bytes - num_before, time.perf_counter() - began
            figures = lags.figures(LAG)
    return [
        *figures,
        milliseconds("one block beside it p50", quantile(beside_s, 0.5)),
        milliseconds("one block beside it p99", quantile(beside_s, 0.99), BESIDE),
        Figure("one block handoffs", len(beside_s)),
        speed("large fetches", num_bytes, took_s),
    ]


class Lags:
    """How late the event loops of agents were since this was made."""

    def __init__(self, agents: Mapping[str, BenchAgent]) -> None:
        self._agents = agents
        self._before = {name: agent.lag_counts() for name, agent in agents.items()}

    @property
    def are_counted(self) -> bool:
        """Whether each agent has counted some."""
        return all(any(counts.values()) for counts in self._added().values())

    def figures(self, target: Target) -> list[Figure]:
        """Of each agent that has counted some."""
        return [
            milliseconds(f"{name} loop lag p99", histogram_quantile(counts, 0.99), target)
            for name, counts in self._added().items()
            if any(counts.values())
        ]

    def _added(self) -> dict[str, dict[float, float]]:
        return {
            name: added_counts(self._before[name], agent.lag_counts())
            for name, agent in self._agents.items()
        }


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
                lags = Lags({**bench.agents, "decode agent": agent})
                seconds = [await pair.timed(tables) for _ in range(NUM_FETCHES)]
                found = [milliseconds("p50", median(seconds)), *lags.figures(LAG_OF_LARGE)]
                figures += [replace(one, name=f"{name}, {way}: {one.name}") for one in found]
    return figures


CASES: Mapping[CaseName, Callable[[Bench, Scale], Awaitable[list[Figure]]]] = {
    CaseName.CONTIGUOUS_64M: partial(
        measure_transfer, shape=BIG, num_mib=64, blocks=contiguous, of_raw=1.2, unmapped=0.85
    ),
    CaseName.CONTIGUOUS_256M: partial(
        measure_transfer, shape=BIG, num_mib=256, blocks=contiguous, of_raw=1.2, unmapped=0.95
    ),
    CaseName.SCATTERED_256K: partial(
        measure_transfer, shape=BIG, num_mib=64, blocks=scattered, of_raw=1.2, unmapped=0.85
    ),
    CaseName.SCATTERED_16K: partial(
        measure_transfer, shape=LAYERED, num_mib=64, blocks=scattered, of_raw=1.5, unmapped=0.85
    ),
    CaseName.FIXED: measure_fixed,
    CaseName.LOAD: measure_load,
    CaseName.PRIORITY: measure_priority,
    CaseName.IDLE: measure_idle,
    CaseName.RATE: measure_rate,
    CaseName.TP_1_TO_2: partial(
        measure_reshape, source=NHD_1, target=NHD_2, of_naive=8.0, packed_of_naive=6.0
    ),
    CaseName.TP_2_TO_1: partial(measure_reshape, source=NHD_2, target=NHD_1, of_naive=8.0),
    CaseName.HND_TO_NHD: partial(measure_reshape, source=HND_1, target=NHD_1, of_naive=8.0),
    CaseName.BLOCK_64_TO_16: partial(measure_reshape, source=NHD_64, target=NHD_1),
    CaseName.MLA: partial(measure_reshape, source=MLA_2, target=MLA_1),
    CaseName.CHUNKED: measure_chunked,
    CaseName.HOST: measure_host,
    CaseName.MEMORY: measure_memory,
    CaseName.LARGE: measure_large,
}


def run_cases(names: Sequence[CaseName], scale: Scale, show: Show) -> None:
    """Measure the cases, and ``show`` the figures of each at once.

    Raises `KVBusError`, alone or in groups, when a handoff fails; the end of the agents' logs is
    shown then.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as folder:
        anyio.run(_run, names, scale, show, Path(folder))


async def _run(names: Sequence[CaseName], scale: Scale, show: Show, folder: Path) -> None:
    async with running(folder) as bench:
        try:
            for name in names:
                sys.stderr.write(f"measuring {name}\n")
                show(name, await CASES[name](bench, scale))
        except* KVBusError:
            for one in bench.agents.values():
                sys.stderr.write(f"{one.child.lost('runs')}\n")
            raise
