"""The engines of the benchmark: decode engines in this process, the line to the prefill engines."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec

from kvbus.bench.caches import ATTACH_TIMEOUT_S, arrived, open_caches, wipe
from kvbus.bench.processes import BenchAgent, answering, ask
from kvbus.bench.shapes import GROUP, PairedBlocks, Shape
from kvbus.engine import DecodeSession, KvCache
from kvbus.engine.bounce import HostDecode
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Fetched
from kvbus.spawn import Child

Ticket = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TimedFetch:
    """One handoff as the decode engine saw it."""

    seconds: float
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class PrefillProcess:
    """The process of all prefill engines, which does one thing at a time."""

    child: Child
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    numbers: "count[int]" = field(default_factory=count)

    async def do(self, op: str, engine_id: str, *arguments: Any) -> Any:
        """Have an engine do something; raises `KVBusError` when it cannot."""
        line = msgspec.json.encode([op, engine_id, arguments])
        async with self.lock:
            answer = msgspec.json.decode(await ask(self.child, line))
        if "error" in answer:
            raise KVBusError(answer["error"])
        return answer["reply"]


@dataclass(frozen=True, slots=True)
class SourceName:
    """A prefill engine, with a cache full of the pattern."""

    engine_id: str
    shape: Shape
    num_blocks: int
    process: PrefillProcess

    async def offer(self, *tables: PairedBlocks) -> list[Ticket]:
        """Offer each of ``tables`` as a request, by way of the ring if the engine has one.

        Answers once all are offered; what goes through a ring is saved meanwhile.
        """
        requests = [self._request(one) for one in tables]
        tickets: list[Ticket] = await self.process.do("offer", self.engine_id, requests)
        return tickets

    async def compute(self, tables: PairedBlocks, num_chunks: int, chunk_s: float) -> Ticket:
        """Start a prefill in chunks, offered while it goes on."""
        arguments = *self._request(tables), num_chunks, chunk_s
        ticket: Ticket = await self.process.do("compute", self.engine_id, *arguments)
        return ticket

    async def ended(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; when those that ended were ready, and when released."""
        ended: list[tuple[float, float]] = await self.process.do("settle", self.engine_id)
        return ended

    def _request(self, tables: PairedBlocks) -> tuple[str, int, list[int]]:
        """A request id that was never used, its tokens and blocks."""
        name = f"request-{next(self.process.numbers)}"
        return name, tables.num_tokens, tables.prefill.tolist()


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill engine and a decode engine of ``shape``, ready and attached."""

    source: SourceName
    shape: Shape
    caches: Sequence[KvCache]
    session: DecodeSession
    host: HostDecode | None = None
    fetches: list[TimedFetch] = field(default_factory=list)
    """Those that `timed` has done."""
    released_s: list[float] = field(default_factory=list)
    """From offer to release, of the same."""

    async def fetch(self, ticket: Ticket, tables: PairedBlocks) -> TimedFetch:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        reader = self.host or self.session
        began = time.perf_counter()
        fetch = reader.fetch(ticket, num_tokens=tables.num_tokens, block_ids={GROUP: tables.decode})
        fetched = await fetch.completed()
        return TimedFetch(time.perf_counter() - began, fetched)

    async def hand_off(self, tables: PairedBlocks) -> TimedFetch:
        """Offer and fetch; only the fetch is timed."""
        (ticket,) = await self.source.offer(tables)
        return await self.fetch(ticket, tables)

    async def timed(self, tables: PairedBlocks) -> float:
        """Seconds of a handoff's fetch; the next one starts after the offer's release."""
        self.fetches.append(await self.hand_off(tables))
        ended = await self.source.ended()
        self.released_s.extend(released_at - ready_at for ready_at, released_at in ended)
        return self.fetches[-1].seconds

    async def verify(self, tables: PairedBlocks) -> None:
        """Do one handoff and compare every byte; the peers are warm after it."""
        wipe(self.caches)
        await self.hand_off(tables)
        source, num_blocks = self.source.shape, self.source.num_blocks
        if not arrived(self.caches, self.shape, source, tables, num_source_blocks=num_blocks):
            raise KVBusError(
                f"a handoff from '{source.name}' to '{self.shape.name}' brought wrong bytes"
            )
        await self.source.ended()


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs: two agents, the prefill engines' process, and this one."""

    prefill_agent: BenchAgent
    decode_agent: BenchAgent
    prefill: PrefillProcess
    folder: Path

    @contextlib.asynccontextmanager
    async def engines(self, shape: Shape, num_blocks: int) -> AsyncIterator[EnginePair]:
        """Engines of one shape with caches of ``num_blocks`` blocks, until the block ends."""
        async with (
            self.source(shape, num_blocks) as source,
            self.reader(shape, num_blocks, source) as pair,
        ):
            yield pair

    @contextlib.asynccontextmanager
    async def source(self, shape: Shape, num_blocks: int) -> AsyncIterator[SourceName]:
        """A prefill engine."""
        engine_id = f"{shape.name}-{next(self.prefill.numbers)}"
        await self.prefill.do("open", engine_id, shape.name, num_blocks)
        yield SourceName(engine_id, shape, num_blocks, self.prefill)
        await self.prefill.do("close", engine_id)

    @contextlib.asynccontextmanager
    async def reader(
        self,
        shape: Shape,
        num_blocks: int,
        source: SourceName,
        *,
        agent: BenchAgent | None = None,
    ) -> AsyncIterator[EnginePair]:
        """A decode engine beside ``agent`` that reads ``source``."""
        path = (agent or self.decode_agent).attach_path
        spec = shape.spec(f"decode-{next(self.prefill.numbers)}")
        session = DecodeSession(path, spec, attach_timeout_s=ATTACH_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(session)
            caches, ring = await open_caches(stack, path, spec, shape, num_blocks)
            await session.register()
            await session.ready()
            host = await stack.enter_async_context(HostDecode(session, *ring)) if ring else None
            yield EnginePair(source, shape, caches, session, host)

    @property
    def agents(self) -> dict[str, BenchAgent]:
        """Both, by their names in figures."""
        return {"prefill agent": self.prefill_agent, "decode agent": self.decode_agent}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each process, this one as the decode engine."""
        return {
            **{name: agent.child.cpu_s() for name, agent in self.agents.items()},
            "prefill engine": self.prefill.child.cpu_s(),
            "decode engine": time.process_time(),
        }


@contextlib.contextmanager
def running_bench(prefill: BenchAgent, decode: BenchAgent, folder: Path) -> Iterator[Bench]:
    """Start the prefill engines' process beside agents that run."""
    module, path = "kvbus.bench.prefill_engine", str(prefill.attach_path)
    with answering("prefill engine", module, path, folder=folder) as child:
        yield Bench(prefill, decode, PrefillProcess(child), folder)
