"""Processes of the cases: two agents, decode engines here, prefill engines in their own."""

import contextlib
import http.client
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvbus.bench.bench_engine import BenchEngine, PairedBlocks, Shape, Ticket
from kvbus.engine import AgentRole
from kvbus.errors import KVBusError
from kvbus.lab.process import EngineChild, Settings, TimedFetch, engine_process, start_agent
from kvbus.planning import Reads
from kvbus.progress import Progress
from kvbus.spawn import Child, free_port

UNMAPPED = "unmapped"
"""It reads as if its peer were on another machine, but over shared memory."""
READERS: Mapping[str, Mapping[str, str | bool]] = {
    UNMAPPED: {"mapped": False},
    **{path: {"path": path} for path in ("mapped", "direct", "staged", "packed")},
}
DEFAULTS: Settings = MappingProxyType({})
ON_HOST = "cpu", "cpu"
LAG_BUCKET = "kvbus_event_loop_lag_seconds_bucket"
LARGEST_LAG = "kvbus_event_loop_largest_lag_seconds"


@dataclass(frozen=True, slots=True)
class BenchAgent:
    child: Child
    attach_path: Path
    metrics_port: int

    def lag_counts(self) -> dict[float, float]:
        return {float(le): count for le, count in self._metric(LAG_BUCKET, label="le").items()}

    def largest_lag_s(self) -> float:
        """Agents report the largest lag of the last 15 s."""
        return self._metric(LARGEST_LAG)[""]

    def _metric(self, name: str, *, label: str = "") -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        return {
            sample.labels.get(label, ""): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name
        }


@contextlib.contextmanager
def agent(
    role: str, folder: Path, *, label: str = "default", settings: Settings = DEFAULTS
) -> Iterator[BenchAgent]:
    """``label`` must be unique for each role."""
    port, home = free_port(), folder / label
    home.mkdir(mode=0o700, exist_ok=True)
    page = {"agent_id": f"{role}-{label}", "http_bind": f"127.0.0.1:{port}"}
    log = folder / f"{role}-{label}.log"
    with start_agent(role, home, log=log, settings={**page, **settings}) as child:
        yield BenchAgent(child, home / role / "attach.sock", port)


@dataclass(frozen=True, slots=True)
class BarePair:
    target: EngineChild
    reader: EngineChild

    async def read_s(self, do: str = "read") -> float:
        """Return the seconds of one READ. ``verify`` fails on wrong bytes."""
        await self.target.request(type(None), "drive")
        took_s = await self.reader.request(float, do)
        await self.target.request(type(None), "rest")
        return took_s


@dataclass(frozen=True, slots=True)
class BenchSource:
    name: str
    shape: Shape
    engines: EngineChild

    async def offer(self, *tables: PairedBlocks) -> list[Ticket]:
        requests = [(uuid.uuid4().hex, one.num_tokens, one.prefill.tolist()) for one in tables]
        return await self.engines.request(list[Ticket], "offer", name=self.name, requests=requests)

    async def park(self) -> float:
        return await self.engines.request(float, "park", name=self.name)

    async def ended(self) -> list[tuple[float, float]]:
        return await self.engines.request(list[tuple[float, float]], "settle", name=self.name)


@dataclass(frozen=True, slots=True)
class Pair:
    source: BenchSource
    reader: BenchEngine
    fetches: list[TimedFetch] = field(default_factory=list)
    released_s: list[float] = field(default_factory=list)

    async def hand_off(self, tables: PairedBlocks) -> TimedFetch:
        """Only the fetch is timed. Raises `FetchFailed`."""
        (ticket,) = await self.source.offer(tables)
        return await self.reader.fetch_timed(ticket, tables)

    async def timed(self, tables: PairedBlocks) -> float:
        self.fetches.append(await self.hand_off(tables))
        ended = await self.source.ended()
        self.released_s.extend(released_at - ready_at for ready_at, released_at in ended)
        return self.fetches[-1].seconds

    async def verify(self, tables: PairedBlocks) -> None:
        """Compare every byte of one handoff, which connects the peers."""
        self.reader.wipe()
        await self.hand_off(tables)
        if not self.reader.has(tables, self.source.shape):
            names = f"from '{self.source.shape}' to '{self.reader.shape}'"
            raise KVBusError(f"a handoff {names} brought wrong bytes")
        await self.source.ended()


@dataclass(frozen=True, slots=True)
class Bench:
    agents: Mapping[str, BenchAgent]
    engines: EngineChild
    folder: Path
    stack: ExitStack
    progress: Progress
    devices: tuple[str, str] = ON_HOST
    """Those of the prefill and the decode engines."""
    others: dict[str, BenchAgent] = field(default_factory=dict)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Objects of the current case."""

    def decode_agent(self, label: str = "") -> BenchAgent:
        if not label:
            return self.agents["decode agent"]
        if label not in self.others:
            started = agent("decode", self.folder, label=label, settings=READERS[label])
            self.others[label] = self.stack.enter_context(started)
        return self.others[label]

    async def source(self, shape: Shape, num_blocks: int) -> BenchSource:
        source = BenchSource(f"prefill-{uuid.uuid4().hex}", shape, self.engines)
        send = partial(self.engines.request, type(None), name=source.name)
        await send("open", shape=shape, num_blocks=num_blocks, device=self.devices[0])
        self.opened.push_async_callback(send, "close")
        return source

    async def pair(
        self, shape: Shape, num_blocks: int, *, source: BenchSource | None = None, label: str = ""
    ) -> Pair:
        """Without ``source``, the engine reads a new one like itself."""
        engine = BenchEngine(
            self.decode_agent(label).attach_path,
            f"decode-{uuid.uuid4().hex}",
            shape,
            num_blocks,
            role=AgentRole.DECODE,
            device=self.devices[1],
        )
        source = source or await self.source(shape, num_blocks)
        return Pair(source, await self.opened.enter_async_context(engine))

    async def bare_pair(self, rows: Reads, size_bytes: int) -> BarePair:
        """``rows`` are offsets in a memory of ``size_bytes``."""
        path, both = self.folder / "rows.npz", list[EngineChild]()
        np.savez(path, local=rows.local, remote=rows.remote)
        command = "kvbus.lab.bare_pair", str(size_bytes), str(path)
        for name in ("bare target", "bare reader"):
            process = engine_process(name, *command, log=self.folder / "bare-pair.log")
            both.append(await self.opened.enter_async_context(process))
        pair = BarePair(*both)
        lent = await pair.target.request(dict[str, Any], "lend")
        await pair.reader.request(type(None), "connect", **lent)
        await pair.read_s("verify")
        return pair

    async def with_prefill_agent(self, label: str, settings: Settings) -> "Bench":
        """Start another prefill agent and its engines' process, for the current case."""
        started = agent("prefill", self.folder, label=label, settings=settings)
        prefill = self.opened.enter_context(started)
        process = _prefill_engines(prefill, self.folder / f"{label}-engines.log")
        engines = await self.opened.enter_async_context(process)
        return replace(self, agents={**self.agents, "prefill agent": prefill}, engines=engines)

    def cpu_s(self) -> dict[str, float]:
        return {
            **{name: agent.child.cpu_s() for name, agent in self.agents.items()},
            "prefill engine": self.engines.child.cpu_s(),
            "decode engine": time.process_time(),
        }


@asynccontextmanager
async def running(
    folder: Path,
    settings: Mapping[str, Settings] = MappingProxyType({}),
    devices: tuple[str, str] = ON_HOST,
    progress: Progress | None = None,
) -> AsyncIterator[Bench]:
    with ExitStack() as stack:
        agents = {}
        for role in ("prefill", "decode"):
            started = agent(role, folder, settings=settings.get(role, DEFAULTS))
            agents[f"{role} agent"] = stack.enter_context(started)
        process = _prefill_engines(agents["prefill agent"], folder / "prefill-engines.log")
        async with process as engines:
            yield Bench(agents, engines, folder, stack, progress or Progress(0), devices)


def _prefill_engines(agent: BenchAgent, log: Path) -> AbstractAsyncContextManager[EngineChild]:
    path = str(agent.attach_path)
    return engine_process("prefill engine", "kvbus.bench.bench_engine", path, log=log)


def memcpy(num_bytes: int) -> Callable[[], Awaitable[float]]:
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)

    async def copy_s() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    return copy_s
