"""Cases of ``kvbus bench``, each measured alternately with its limit.

The limit is a bare NIXL READ, a memcpy for mapped memory, or `floor` for small handoffs.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median

import anyio

from kvbus.bench.bench_engine import (
    BIG,
    HND_1,
    LAYERED,
    NHD_1,
    NHD_2,
    SMALL,
    PairedBlocks,
    Shape,
    Ticket,
    contiguous,
    direct_descriptors,
    scattered,
    scattered_tokens,
)
from kvbus.bench.figures import (
    Figure,
    Scale,
    Ways,
    in_turn,
    milliseconds,
    percentiles,
    speed,
    stages,
)
from kvbus.bench.floor import floor
from kvbus.bench.pairs import UNMAPPED, Bench, BenchAgent, Pair, memcpy
from kvbus.bench.park_case import measure_park
from kvbus.bench.run import Cases
from kvbus.histograms import added_counts, histogram_quantile
from kvbus.progress import SECONDS

MIB = 1 << 20
NUM_BYTES = 64 * MIB
NUM_SMALL = 1000

CONCURRENCY = 64
OFFERS_AT_ONCE = 32
WARM_UP_S, RATE_S = 1.0, 10.0

LOAD_S, LARGE_S = 15.0, 210.0
"""The first suffices for p99 of the loop lag, the second for its maximum."""
CHECK_S = 10.0
NUM_LARGE = 4
LARGE_BLOCKS = 256 * MIB // BIG.block_bytes
VERY_BIG_BLOCKS = (4 << 30) // BIG.block_bytes

CALM_S, IDLE_S = 1.0, 20.0

RAW, NAIVE = "raw READ", "naive READ"
"""A bare READ of a handoff's descriptors, and one of all its runs."""
OTHERS = ("mapped", UNMAPPED, "direct", "staged", "packed")


async def measure_transfer(
    bench: Bench,
    scale: Scale,
    *,
    shape: Shape,
    blocks: Callable[[int, Shape], PairedBlocks],
    of_raw: float,
    unmapped: float,
) -> list[Figure]:
    """``of_raw`` and ``unmapped`` are targets, relative to the READ's speed."""
    tables = blocks(scale.count(NUM_BYTES // shape.block_bytes), shape)
    rows, size_bytes = direct_descriptors(shape, shape, tables)
    num_blocks = tables.capacities[0]
    raw = await bench.bare_pair(rows, size_bytes)
    pair = await bench.pair(shape, num_blocks)
    far = await bench.pair(shape, num_blocks, source=pair.source, label=UNMAPPED)
    for one in (pair, far):
        await one.verify(tables)
    ways: Ways = {
        RAW: raw.read_s,
        "kvbus": partial(pair.timed, tables),
        UNMAPPED: partial(far.timed, tables),
        "memcpy": memcpy(rows.num_bytes),
    }
    times = await in_turn(bench.progress.parts(scale.rounds, "rounds"), ways)
    seconds = {name: median(some) for name, some in times.items()}
    of_raw_speed = {name: seconds[RAW] / some for name, some in seconds.items()}
    huge = {
        RAW: await raw.reader.request(float, "huge_share"),
        "kvbus": pair.reader.huge_share(),
    }
    return [
        Figure(f"kvbus vs {RAW}", of_raw_speed["kvbus"], "x", least=of_raw),
        Figure(f"{UNMAPPED} vs {RAW}", of_raw_speed[UNMAPPED], "x", least=unmapped),
        *(Figure(f"{name}, in huge pages", share * 100, "%") for name, share in huge.items()),
        *(speed(name, rows.num_bytes, some) for name, some in seconds.items()),
        Figure("kvbus vs memcpy", seconds["memcpy"] / seconds["kvbus"], "x"),
        Figure("descriptors", len(rows.local)),
        *(milliseconds(f"{name} p50", some) for name, some in seconds.items()),
        *stages(pair.fetches),
        milliseconds("offer to released p50", median(pair.released_s)),
    ]


async def measure_reshape(
    bench: Bench, scale: Scale, *, source: Shape, target: Shape, packed: float | None = None
) -> list[Figure]:
    """``packed`` is a target, relative to the READ's speed."""
    num_tokens = scale.count(NUM_BYTES // target.token_bytes, at_least=source.block)
    tables = scattered_tokens(source, target, num_tokens)
    num_source, num_target = tables.capacities
    rows, size_bytes = direct_descriptors(source, target, tables)
    raw = await bench.bare_pair(rows, size_bytes)
    engine = await bench.source(source, num_source)
    pairs = {"equal": await bench.pair(target, num_target)}
    for name, label in {"auto": "", **{one: one for one in OTHERS}}.items():
        pairs[name] = await bench.pair(target, num_target, source=engine, label=label)
    num_bytes = num_tokens * target.token_bytes
    ways = {NAIVE: raw.read_s, "memcpy": memcpy(num_bytes)}
    for name, pair in pairs.items():
        blocks = scattered_tokens(pair.source.shape, target, num_tokens)
        await pair.verify(blocks)
        ways[name] = partial(pair.timed, blocks)
    times = await in_turn(bench.progress.parts(scale.rounds, "rounds"), ways)
    seconds = {name: median(one) for name, one in times.items()}
    naive_s, auto_s, packed_s = (seconds[name] for name in (NAIVE, "auto", "packed"))
    unmapped_s = min(seconds["direct"], seconds["staged"], packed_s)
    best_s, of_best = min(seconds["mapped"], unmapped_s), 1 / 1.2
    return [
        Figure(f"auto vs {NAIVE}", naive_s / auto_s, "x", least=8.0),
        Figure("auto vs equal shapes", seconds["equal"] / auto_s, "x", least=0.7),
        Figure("auto vs the best path", best_s / auto_s, "x", least=of_best),
        Figure(f"{UNMAPPED} vs its best path", unmapped_s / seconds[UNMAPPED], "x", least=of_best),
        Figure(f"{UNMAPPED} vs {NAIVE}", naive_s / seconds[UNMAPPED], "x", least=packed),
        Figure(f"packed vs {NAIVE}", naive_s / packed_s, "x", least=packed),
        Figure(f"staged vs {NAIVE}", naive_s / seconds["staged"], "x"),
        Figure(f"direct vs {NAIVE}", naive_s / seconds["direct"], "x"),
        *(speed(f"  {name}", num_bytes, some) for name, some in seconds.items()),
        *(milliseconds(f"  {name} p50", some) for name, some in seconds.items()),
        Figure(f"descriptors of {NAIVE}", len(rows.local)),
    ]


async def measure_fixed(bench: Bench, scale: Scale) -> list[Figure]:
    """Measure one block, after the release of the one before."""
    pair = await bench.pair(SMALL, 2)
    await pair.verify(contiguous(1))
    async with floor(bench.folder) as bare:
        ways: Ways = {"floor": bare.hand_off, "handoff": partial(pair.timed, contiguous(1))}
        rounds = bench.progress.parts(scale.count(NUM_SMALL), "rounds")
        times = await in_turn(rounds, ways)
    handoff, bare_ones = times["handoff"], times["floor"]
    ours, theirs = percentiles("handoff", handoff, most_p50=1.0), percentiles("floor", bare_ones)
    return [
        *ours,
        *theirs,
        *(
            Figure(f"{one.name} vs floor", one.value / other.value, "x", most=most)
            for one, other, most in zip(ours, theirs, (2.0, 3.0), strict=False)
        ),
        *stages(pair.fetches),
        *percentiles("offer to released", pair.released_s),
        Figure("handoffs", len(handoff)),
    ]


async def measure_rate(bench: Bench, scale: Scale) -> list[Figure]:
    async with floor(bench.folder) as bare:
        bare_rate, bare_s = await bare.rate(CONCURRENCY, scale.seconds(WARM_UP_S))
    timed_at: list[tuple[float, float]] = []
    pair = await bench.pair(SMALL, 8 * CONCURRENCY)
    await pair.verify(contiguous(1))
    async with anyio.create_task_group() as tasks:
        ends, offers = anyio.Event(), OfferQueue(2 * OFFERS_AT_ONCE)
        tasks.start_soon(_offer_blocks, pair, offers, ends)
        for _ in range(CONCURRENCY):
            tasks.start_soon(_fetch_blocks, pair, offers, timed_at)
        await anyio.sleep(scale.seconds(WARM_UP_S))
        before, began_s, seconds = bench.cpu_s(), time.monotonic(), list[float]()
        while not seconds:
            await _passed(bench, scale.seconds(RATE_S))
            after, ended_s = bench.cpu_s(), time.monotonic()
            seconds = [one_s for at_s, one_s in timed_at if at_s >= began_s]
        ends.set()
    await pair.source.ended()
    each_s = {name: (after[name] - before[name]) / len(seconds) for name in after}
    agents_s = sum(each_s[name] for name in bench.agents)
    return [
        Figure("handoffs", len(seconds) / (ended_s - began_s), "1/s", least=4000),
        *percentiles("handoff", seconds),
        *(Figure(f"{name} CPU", one_s * 1e6, "us each") for name, one_s in each_s.items()),
        Figure("both agents CPU", agents_s * 1e6, "us each", most=300),
        Figure("floor handoffs", bare_rate, "1/s"),
        Figure("floor agents CPU", bare_s * 1e6, "us each"),
        Figure("both agents CPU vs floor", agents_s / bare_s, "x"),
    ]


async def _passed(bench: Bench, seconds: float) -> None:
    for until_s in _deadlines(bench, seconds):
        await anyio.sleep(until_s - time.perf_counter())


def _deadlines(bench: Bench, seconds: float) -> Iterator[float]:
    """Yield about one a second, as progress is drawn between two."""
    began_s, number = time.perf_counter(), math.ceil(seconds)
    for done in bench.progress.parts(number, SECONDS):
        yield began_s + seconds * (done + 1) / number


OfferQueue = asyncio.Queue[tuple[Ticket, PairedBlocks] | None]


async def _offer_blocks(pair: Pair, offers: OfferQueue, ends: anyio.Event) -> None:
    blocks = cycle(scattered(4 * CONCURRENCY).prefill.tolist())
    while not ends.is_set():
        batch = [contiguous(1, first_block=next(blocks)) for _ in range(OFFERS_AT_ONCE)]
        for one in zip(await pair.source.offer(*batch), batch, strict=True):
            await offers.put(one)
    for _ in range(CONCURRENCY):
        await offers.put(None)


async def _fetch_blocks(
    pair: Pair, offers: OfferQueue, timed_at: list[tuple[float, float]]
) -> None:
    while (offered := await offers.get()) is not None:
        timed = await pair.reader.fetch_timed(*offered)
        timed_at.append((timed.at_s, timed.seconds))


async def measure_load(bench: Bench, scale: Scale) -> list[Figure]:
    num_blocks = scale.count(LARGE_BLOCKS)
    parts = [
        scattered(num_blocks, first_block=2 * part * num_blocks, seed=part)
        for part in range(NUM_LARGE)
    ]
    return await _measure_beside(
        bench, scale, parts, lag_ms={"p99": 8.0}, load_s=LOAD_S, one_block_ms=15.0
    )


async def measure_large(bench: Bench, scale: Scale) -> list[Figure]:
    whole, figures = contiguous(scale.count(VERY_BIG_BLOCKS)), list[Figure]()
    for label in ("", UNMAPPED):
        found = await _measure_beside(
            bench, scale, [whole], lag_ms={"max": 15.0}, load_s=LARGE_S, label=label
        )
        figures += [replace(one, name=f"{label or 'mapped'}: {one.name}") for one in found]
    return figures


async def _measure_beside(
    bench: Bench,
    scale: Scale,
    parts: Sequence[PairedBlocks],
    *,
    lag_ms: Mapping[str, float],
    load_s: float,
    label: str = "",
    one_block_ms: float | None = None,
) -> list[Figure]:
    """``lag_ms`` and ``one_block_ms`` are targets."""
    small_s, large_s = list[float](), list[float]()
    num_blocks = 1 + max(int(part.prefill.max()) for part in parts)
    large = await bench.pair(BIG, num_blocks, label=label)
    small = await bench.pair(SMALL, 2, label=label)
    await large.verify(parts[0])
    await small.verify(contiguous(1))
    ends = anyio.Event()

    async def repeat(part: PairedBlocks) -> None:
        while not ends.is_set():
            large_s.append((await large.hand_off(part)).seconds)

    async with anyio.create_task_group() as tasks:
        lags = LoopLags({**bench.agents, "decode agent": bench.decode_agent(label)})
        for part in parts:
            tasks.start_soon(repeat, part)
        began_s = time.perf_counter()
        for until_s in _deadlines(bench, scale.seconds(load_s)):
            while time.perf_counter() < until_s or not large_s:
                small_s.append((await small.hand_off(contiguous(1))).seconds)
                lags.check_when_due()
        took_s, num_large = time.perf_counter() - began_s, len(large_s)
        lag_figures = await lags.figures(lag_ms)
        ends.set()
    await bench.opened.aclose()  # frees 4 GiB, which the next case needs
    num_bytes = num_large * len(parts[0].decode) * BIG.block_bytes
    return [
        *lag_figures,
        *percentiles("one-block handoff", small_s, most=one_block_ms),
        Figure("one-block handoffs", len(small_s)),
        milliseconds("large fetch p50", median(large_s)),
        speed("large fetches", num_bytes, took_s),
    ]


class LoopLags:
    def __init__(self, agents: Mapping[str, BenchAgent]) -> None:
        self._agents = agents
        self._before = {name: agent.lag_counts() for name, agent in agents.items()}
        self._largest_s = dict.fromkeys(agents, 0.0)
        self._due_s = time.perf_counter() + LOAD_S

    def check_when_due(self) -> None:
        """Agents report the largest lag of the last 15 s only."""
        if (now := time.perf_counter()) >= self._due_s:
            self._due_s = now + CHECK_S
            self._check()

    async def figures(self, most_ms: Mapping[str, float]) -> list[Figure]:
        lags = self._counts()
        while not all(any(counts.values()) for counts in lags.values()):
            await anyio.sleep(0.1)
            lags = self._counts()
        self._check()
        found = []
        for name, counts in lags.items():
            p99_s = histogram_quantile(counts, 0.99)
            for which, value_s in (("p99", p99_s), ("max", self._largest_s[name])):
                found.append(
                    milliseconds(f"{name} loop lag {which}", value_s, most=most_ms.get(which))
                )
        return [*found, Figure("loop lags", min(max(one.values()) for one in lags.values()))]

    def _check(self) -> None:
        for name, agent in self._agents.items():
            self._largest_s[name] = max(self._largest_s[name], agent.largest_lag_s())

    def _counts(self) -> dict[str, dict[float, float]]:
        return {
            name: added_counts(self._before[name], agent.lag_counts())
            for name, agent in self._agents.items()
        }


async def measure_idle(bench: Bench, scale: Scale) -> list[Figure]:
    duration_s = scale.seconds(IDLE_S)
    pair = await bench.pair(SMALL, 2)
    await pair.verify(contiguous(1))
    await anyio.sleep(CALM_S)
    before = bench.cpu_s()
    await _passed(bench, duration_s)
    after = bench.cpu_s()
    shares = {name: (after[name] - before[name]) / duration_s * 100 for name in bench.agents}
    return [Figure(f"{name} CPU", n, "% of core", most=1.0) for name, n in shares.items()]


CASES: Cases = {
    "contiguous-64m": partial(
        measure_transfer, shape=BIG, blocks=contiguous, of_raw=1.2, unmapped=0.92
    ),
    "scattered-256k": partial(
        measure_transfer, shape=BIG, blocks=scattered, of_raw=1.2, unmapped=0.9
    ),
    "scattered-16k": partial(
        measure_transfer, shape=LAYERED, blocks=scattered, of_raw=1.5, unmapped=0.92
    ),
    "fixed": measure_fixed,
    "rate": measure_rate,
    "load": measure_load,
    "idle": measure_idle,
    "tp-1-to-2": partial(measure_reshape, source=NHD_1, target=NHD_2, packed=8.0),
    "hnd-to-nhd": partial(measure_reshape, source=HND_1, target=NHD_1),
    "large": measure_large,
    "park": measure_park,
}
