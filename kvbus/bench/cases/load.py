"""How much the agents still hear, and how long a small handoff takes, while 1 GiB is in flight."""

import time

import anyio

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Target
from kvbus.bench.processes import BenchAgent
from kvbus.bench.scale import Scale
from kvbus.bench.shapes import BIG, SMALL, contiguous, scattered
from kvbus.bench.stats import added_counts, histogram_quantile, quantile
from kvbus.bus import RequestClient, new_boot_id, new_context
from kvbus.protocol.engine import Ping

CASE = "load"
NUM_LARGE = 4
LARGE_BLOCKS = (256 << 20) // BIG.block_bytes
DURATION_S = 15.0
PING_EVERY_S = 0.01
LAG = Target(10.0)
BESIDE = Target(15.0)


async def measure_load(bench: Bench, scale: Scale) -> list[Figure]:
    """Small handoffs and pings beside large fetches, for a while."""
    large_blocks = scale.count(LARGE_BLOCKS)
    async with (
        bench.engines(BIG, 2 * NUM_LARGE * large_blocks) as large,
        bench.engines(SMALL, 2) as small,
    ):
        await large.verify(scattered(large_blocks))
        await small.verify(contiguous(1))
        load = _Load(bench, large, large_blocks)
        return await load.measure(small, scale.seconds(DURATION_S))


class _Load:
    """The large fetches and pings that go on beside what is measured."""

    def __init__(self, bench: Bench, large: EnginePair, large_blocks: int) -> None:
        self._bench, self._large, self._large_blocks = bench, large, large_blocks
        self._stop = anyio.Event()
        self._num_large = 0
        self._pings_s: dict[str, list[float]] = {"prefill agent": [], "decode agent": []}

    async def measure(self, small: EnginePair, duration_s: float) -> list[Figure]:
        agents = {
            "prefill agent": self._bench.prefill_agent,
            "decode agent": self._bench.decode_agent,
        }
        before = {name: agent.lag_counts() for name, agent in agents.items()}
        beside_s: list[float] = []
        async with anyio.create_task_group() as tasks:
            for part in range(NUM_LARGE):
                tasks.start_soon(self._repeat, part)
            for name, endpoint in (await self._endpoints(small)).items():
                tasks.start_soon(self._ping, name, endpoint)
            began, num_before = time.perf_counter(), self._num_large
            while time.perf_counter() < began + duration_s or not all(self._pings_s.values()):
                beside_s.append((await small.hand_off(contiguous(1))).seconds)
            elapsed_s = time.perf_counter() - began
            num_large = self._num_large - num_before
            lags = {name: await _lags(agent, before[name]) for name, agent in agents.items()}
            self._stop.set()
        moved_bytes = num_large * self._large_blocks * BIG.block_bytes
        return [
            *self._lag_figures(lags),
            Figure(CASE, "one block beside it p50", quantile(beside_s, 0.5) * 1e3, "ms"),
            Figure(CASE, "one block beside it p99", quantile(beside_s, 0.99) * 1e3, "ms", BESIDE),
            Figure(CASE, "one block handoffs", len(beside_s), ""),
            Figure(CASE, "large fetches", moved_bytes / elapsed_s / 1e9, "GB/s"),
        ]

    def _lag_figures(self, lags: dict[str, dict[float, float]]) -> list[Figure]:
        figures: list[Figure] = []
        for name, counts in lags.items():
            lag_ms = histogram_quantile(counts, 0.99) * 1e3
            pings_s = self._pings_s[name]
            figures += [
                Figure(CASE, f"{name} loop lag p99", lag_ms, "ms", LAG),
                Figure(CASE, f"{name} ping p50", quantile(pings_s, 0.5) * 1e3, "ms"),
                Figure(CASE, f"{name} ping p99", quantile(pings_s, 0.99) * 1e3, "ms"),
            ]
        return figures

    async def _endpoints(self, small: EnginePair) -> dict[str, str]:
        (ticket,) = await small.offer_all([contiguous(1)])
        await small.fetch(ticket, contiguous(1))
        return {
            "prefill agent": ticket["endpoint"],
            "decode agent": small.session.agent.peer_endpoint,
        }

    async def _repeat(self, part: int) -> None:
        first_block = 2 * part * self._large_blocks
        tables = scattered(self._large_blocks, first_block=first_block, seed=part)
        while not self._stop.is_set():
            await self._large.hand_off(tables)
            self._num_large += 1

    async def _ping(self, name: str, endpoint: str) -> None:
        with new_context() as context:
            client = RequestClient(context, endpoint, boot=new_boot_id())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.run)
                await client.ask(Ping(), timeout_s=5)
                while not self._stop.is_set():
                    began = time.perf_counter()
                    await client.ask(Ping(), timeout_s=5)
                    self._pings_s[name].append(time.perf_counter() - began)
                    await anyio.sleep(PING_EVERY_S)
                tasks.cancel_scope.cancel()


async def _lags(agent: BenchAgent, before: dict[float, float]) -> dict[float, float]:
    """What was added to the counts since ``before``; an agent that was slow to count is awaited."""
    while True:
        added = added_counts(before, agent.lag_counts())
        if any(added.values()):
            return added
        await anyio.sleep(PING_EVERY_S)
