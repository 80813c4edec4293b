"""How much the agents still hear, and how long a small handoff takes, while 1 GiB is in flight."""

import time
from dataclasses import dataclass, field

import anyio

from kvbus.bench.engines import Bench, EnginePair
from kvbus.bench.figures import Figure, Scale, Target, milliseconds, speed
from kvbus.bench.processes import BenchAgent
from kvbus.bench.shapes import BIG, SMALL, contiguous, scattered
from kvbus.bench.stats import quantile
from kvbus.bus import RequestClient, new_boot_id, new_context
from kvbus.histograms import added_counts, histogram_quantile
from kvbus.protocol.engine import Ping

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
        (ticket,) = await small.source.offer(contiguous(1))
        await small.fetch(ticket, contiguous(1))
        endpoints = ticket["endpoint"], small.session.agent.peer_endpoint
        load = _Load(large, large_blocks)
        heard = [
            _Heard(name, agent, endpoint, agent.lag_counts())
            for (name, agent), endpoint in zip(bench.agents.items(), endpoints, strict=True)
        ]
        async with anyio.create_task_group() as tasks:
            for part in range(NUM_LARGE):
                tasks.start_soon(load.repeat, part)
            for one in heard:
                tasks.start_soon(one.ping, load.stop)
            figures = await _beside(load, small, heard, scale.seconds(DURATION_S))
            load.stop.set()
    return figures


async def _beside(
    load: "_Load", small: EnginePair, heard: list["_Heard"], duration_s: float
) -> list[Figure]:
    """Small handoffs, one after the other; what the agents heard meanwhile."""
    beside_s: list[float] = []
    began, num_before = time.perf_counter(), load.num_fetches
    while time.perf_counter() < began + duration_s or not all(one.pings_s for one in heard):
        beside_s.append((await small.hand_off(contiguous(1))).seconds)
    elapsed_s = time.perf_counter() - began
    num_bytes = (load.num_fetches - num_before) * load.num_blocks * BIG.block_bytes
    return [
        *[figure for one in heard for figure in await one.figures()],
        milliseconds("one block beside it p50", quantile(beside_s, 0.5)),
        milliseconds("one block beside it p99", quantile(beside_s, 0.99), BESIDE),
        Figure("one block handoffs", len(beside_s)),
        speed("large fetches", num_bytes, elapsed_s),
    ]


@dataclass(slots=True)
class _Load:
    """Large fetches that go on beside what is measured."""

    pair: EnginePair
    num_blocks: int
    num_fetches: int = 0
    stop: anyio.Event = field(default_factory=anyio.Event)

    async def repeat(self, part: int) -> None:
        first_block = 2 * part * self.num_blocks
        tables = scattered(self.num_blocks, first_block=first_block, seed=part)
        while not self.stop.is_set():
            await self.pair.hand_off(tables)
            self.num_fetches += 1


@dataclass(slots=True)
class _Heard:
    """What an agent hears: pings, and the lag of its event loop since ``before``."""

    name: str
    agent: BenchAgent
    endpoint: str
    before: dict[float, float]
    pings_s: list[float] = field(default_factory=list)

    async def ping(self, stop: anyio.Event) -> None:
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
            milliseconds(f"{self.name} ping p50", quantile(self.pings_s, 0.5)),
            milliseconds(f"{self.name} ping p99", quantile(self.pings_s, 0.99)),
        ]
