"""What runs for the cases: two agents, decode engines here, prefill engines in their process."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvbus.bench.engine import BenchEngine, Request, Ticket
from kvbus.bench.processes import BenchAgent, agent
from kvbus.bench.shapes import PairedBlocks, Shape
from kvbus.engine import AgentRole
from kvbus.errors import KVBusError
from kvbus.lab.process import EngineChild, Taken, engine_process

T = TypeVar("T")

UNMAPPED = "unmapped"
"""A decode agent that reads as one on another machine would, but over shared memory."""
READERS: Mapping[str, Mapping[str, str | bool]] = {
    UNMAPPED: {"mapped": False},
    **{path: {"path": path} for path in ("mapped", "direct", "packed")},
}
"""Decode agents that cases compare with the default one, by label: their configuration."""


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill engine with a cache full of the pattern, in the process of all of them."""

    engine_id: str
    shape: Shape
    bench: "Bench"

    async def do(self, kind: type[T], what: str, **given: Any) -> T:
        """Have the engine do something, and reply; raises `KVBusError` when it cannot."""
        return await self.bench.engines.ask(kind, what, engine=self.engine_id, **given)

    async def offer(self, *tables: PairedBlocks) -> list[Ticket]:
        """Offer each of ``tables`` as a request; answers once all are offered."""
        requests = [self._request(one) for one in tables]
        return [*await self.do(list[dict[str, Any]], "offer_all", requests=requests)]

    async def compute(self, tables: PairedBlocks, num_chunks: int, chunk_s: float) -> Ticket:
        """Start a prefill in chunks, offered while it goes on."""
        request, chunks = self._request(tables), {"num_chunks": num_chunks, "chunk_s": chunk_s}
        return await self.do(dict[str, Any], "compute", request=request, **chunks)

    async def ended(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; when those that ended were ready, and when released."""
        return await self.do(list[tuple[float, float]], "settle")

    def _request(self, tables: PairedBlocks) -> Request:
        number = next(self.bench.numbers)
        return f"request-{number}", tables.num_tokens, tables.prefill.tolist()


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill engine, and a decode engine that reads it."""

    source: Source
    reader: BenchEngine
    fetches: list[Taken] = field(default_factory=list)
    """Those that `timed` has done."""
    released_s: list[float] = field(default_factory=list)
    """From offer to release, of the same."""

    async def hand_off(self, tables: PairedBlocks, priority: int = 0) -> Taken:
        """Offer and fetch; only the fetch is timed."""
        (ticket,) = await self.source.offer(tables)
        return await self.fetch(ticket, tables, priority)

    async def fetch(self, ticket: Ticket, tables: PairedBlocks, priority: int = 0) -> Taken:
        """Fetch what was offered, and time it; raises `FetchFailed`."""
        return await self.reader.run(self.reader.take(ticket, tables, priority))

    async def timed(self, tables: PairedBlocks) -> float:
        """Seconds of a handoff's fetch; the next one starts after the offer's release."""
        self.fetches.append(await self.hand_off(tables))
        ended = await self.source.ended()
        self.released_s.extend(released_at - ready_at for ready_at, released_at in ended)
        return self.fetches[-1].seconds

    async def verify(self, tables: PairedBlocks) -> None:
        """Do one handoff and compare every byte; the peers are warm after it."""
        self.reader.wipe()
        await self.hand_off(tables)
        names = f"from '{self.source.shape.name}' to '{self.reader.shape.name}'"
        if not self.reader.has(tables, self.source.shape):
            raise KVBusError(f"a handoff {names} brought wrong bytes")
        await self.source.ended()


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs: two agents by their names in figures, the prefill engines' process."""

    agents: Mapping[str, BenchAgent]
    engines: EngineChild
    folder: Path
    stack: ExitStack
    others: dict[str, BenchAgent] = field(default_factory=dict)
    """Decode agents of `READERS`, since a case wanted them first."""
    numbers: "count[int]" = field(default_factory=count)

    def other_agent(self, label: str) -> BenchAgent:
        """The decode agent of `READERS` with this label; it ends with the benchmark."""
        if label not in self.others:
            started = agent("decode", self.folder, label=label, settings=READERS[label])
            self.others[label] = self.stack.enter_context(started)
        return self.others[label]

    @asynccontextmanager
    async def pair(self, shape: Shape, num_blocks: int) -> AsyncIterator[Pair]:
        """Engines of one shape with caches of ``num_blocks`` blocks."""
        async with (
            self.source(shape, num_blocks) as source,
            self.reader(shape, num_blocks, source) as pair,
        ):
            yield pair

    @asynccontextmanager
    async def source(self, shape: Shape, num_blocks: int) -> AsyncIterator[Source]:
        """A prefill engine."""
        source = Source(f"{shape.name}-{next(self.numbers)}", shape, self)
        await source.do(type(None), "open", shape=shape.name, num_blocks=num_blocks)
        yield source
        await source.do(type(None), "close")

    @asynccontextmanager
    async def reader(
        self, shape: Shape, num_blocks: int, source: Source, *, agent: BenchAgent | None = None
    ) -> AsyncIterator[Pair]:
        """A decode engine beside ``agent``, or the default one, that reads ``source``."""
        path = (agent or self.agents["decode agent"]).attach_path
        name = f"decode-{next(self.numbers)}"
        engine = BenchEngine(path, name, shape, num_blocks, role=AgentRole.DECODE)
        async with engine as reader:
            yield Pair(source, reader)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each process, this one as the decode engine."""
        return {
            **{name: agent.child.cpu_s() for name, agent in self.agents.items()},
            "prefill engine": self.engines.child.cpu_s(),
            "decode engine": time.process_time(),
        }


@asynccontextmanager
async def running(
    folder: Path, settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> AsyncIterator[Bench]:
    """Agents below ``folder`` and the prefill engines' process.

    ``settings`` are those of agents that do not have the default ones, by role.
    """
    with ExitStack() as stack:
        agents = {}
        for role in ("prefill", "decode"):
            started = agent(role, folder, settings=settings.get(role, {}))
            agents[f"{role} agent"] = stack.enter_context(started)
        path, log = str(agents["prefill agent"].attach_path), folder / "prefill-engines.log"
        process = engine_process("prefill engine", "kvbus.bench.engine", path, log=log)
        async with process as engines:
            yield Bench(agents, engines, folder, stack)
