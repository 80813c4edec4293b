"""The engines of the benchmark: decode engines in this process, the line to the prefill engines."""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec

from kvbus.bench.caches import ATTACH_TIMEOUT_S, arrived, open_caches, wipe
from kvbus.bench.processes import BenchAgent, agent, ask
from kvbus.bench.shapes import GROUP, PairedBlocks, Shape
from kvbus.engine import DecodeSession, KvCache
from kvbus.engine.bounce import HostDecode
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Fetched
from kvbus.spawn import Child

Ticket = Mapping[str, Any]

UNMAPPED = "unmapped"
"""A decode agent that reads as one on another machine would, but over shared memory."""
READERS: Mapping[str, Mapping[str, str | float]] = {
    UNMAPPED: {"mapped": False},
    **{path: {"path": path} for path in ("mapped", "direct", "packed")},
}
"""Decode agents that cases compare with the default one, by label: their configuration."""


@dataclass(frozen=True, slots=True)
class TimedFetch:
    """One handoff as the decode engine saw it."""

    seconds: float
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class SourceName:
    """A prefill engine with a cache full of the pattern; its process does one thing at a time."""

    engine_id: str
    shape: Shape
    process: Child
    lock: anyio.Lock
    numbers: "count[int]"

    async def do(self, op: str, *arguments: Any) -> Any:
        """Have the engine do something; raises `KVBusError` when it cannot."""
        line = msgspec.json.encode([op, self.engine_id, arguments])
        async with self.lock:
            answer = msgspec.json.decode(await ask(self.process, line))
        if "error" in answer:
            raise KVBusError(answer["error"])
        return answer["reply"]

    async def offer(self, *tables: PairedBlocks) -> list[Ticket]:
        """Offer each of ``tables`` as a request, by way of the ring if the engine has one.

        Answers once all are offered; what goes through a ring is saved meanwhile.
        """
        tickets: list[Ticket] = await self.do("offer", [self._request(one) for one in tables])
        return tickets

    async def compute(self, tables: PairedBlocks, num_chunks: int, chunk_s: float) -> Ticket:
        """Start a prefill in chunks, offered while it goes on."""
        ticket: Ticket = await self.do("compute", *self._request(tables), num_chunks, chunk_s)
        return ticket

    async def ended(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; when those that ended were ready, and when released."""
        ended: list[tuple[float, float]] = await self.do("settle")
        return ended

    def _request(self, tables: PairedBlocks) -> tuple[str, int, list[int]]:
        """A request id that was never used, its tokens and blocks."""
        return f"request-{next(self.numbers)}", tables.num_tokens, tables.prefill.tolist()


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill engine and a decode engine of ``shape``, ready and attached."""

    source: SourceName
    shape: Shape
    caches: Sequence[KvCache]
    session: DecodeSession
    reader: DecodeSession | HostDecode
    fetches: list[TimedFetch] = field(default_factory=list)
    """Those that `timed` has done."""
    released_s: list[float] = field(default_factory=list)
    """From offer to release, of the same."""

    async def fetch(self, ticket: Ticket, tables: PairedBlocks, priority: int = 0) -> TimedFetch:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        began, block_ids = time.perf_counter(), {GROUP: tables.decode}
        fetch = self.reader.fetch(
            ticket, num_tokens=tables.num_tokens, block_ids=block_ids, priority=priority
        )
        fetched = await fetch.ended
        return TimedFetch(time.perf_counter() - began, fetched)

    async def hand_off(self, tables: PairedBlocks, priority: int = 0) -> TimedFetch:
        """Offer and fetch; only the fetch is timed."""
        (ticket,) = await self.source.offer(tables)
        return await self.fetch(ticket, tables, priority)

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
        source = self.source.shape
        if not arrived(self.caches, tables, source_block_size=source.block_size):
            raise KVBusError(
                f"a handoff from '{source.name}' to '{self.shape.name}' brought wrong bytes"
            )
        await self.source.ended()


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs: two agents by their names in figures, the prefill engines' process."""

    agents: Mapping[str, BenchAgent]
    prefill: Child
    folder: Path
    stack: contextlib.ExitStack
    others: dict[str, BenchAgent] = field(default_factory=dict)
    """Decode agents of `READERS`, since a case wanted them first."""
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _numbers: "count[int]" = field(default_factory=count)

    def other_agent(self, label: str) -> BenchAgent:
        """The decode agent of `READERS` with this label; it ends with the benchmark."""
        if label not in self.others:
            started = agent("decode", self.folder, label=label, settings=READERS[label])
            self.others[label] = self.stack.enter_context(started)
        return self.others[label]

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
        engine_id = f"{shape.name}-{next(self._numbers)}"
        source = SourceName(engine_id, shape, self.prefill, self._lock, self._numbers)
        await source.do("open", shape.name, num_blocks)
        yield source
        await source.do("close")

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
        path = (agent or self.agents["decode agent"]).attach_path
        spec = shape.spec(f"decode-{next(self._numbers)}")
        session = DecodeSession(path, spec, attach_timeout_s=ATTACH_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(session)
            caches, ring = await open_caches(stack, path, spec, shape, num_blocks)
            await session.register()
            await session.ready()
            reader: DecodeSession | HostDecode = session
            if ring is not None:
                reader = await stack.enter_async_context(HostDecode(session, *ring))
            yield EnginePair(source, shape, caches, session, reader)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each process, this one as the decode engine."""
        return {
            **{name: agent.child.cpu_s() for name, agent in self.agents.items()},
            "prefill engine": self.prefill.cpu_s(),
            "decode engine": time.process_time(),
        }
