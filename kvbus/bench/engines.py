"""The decode engines of the benchmark, in this process, and its line to the prefill engines'."""

import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec

from kvbus.bench.arrival import arrived, wipe
from kvbus.bench.processes import BenchAgent, ask, cpu_s, running
from kvbus.bench.ranks import ATTACH_TIMEOUT_S, open_ranks
from kvbus.bench.shapes import GROUP, PairedBlocks, Shape
from kvbus.engine import DecodeSession, KvCache
from kvbus.engine.bounce import HostDecode
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Fetched

Ticket = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TimedFetch:
    """One handoff as the decode engine saw it."""

    seconds: float
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class PrefillEngines:
    """The process of all prefill engines, which does one thing at a time."""

    process: subprocess.Popen[bytes]
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    numbers: "count[int]" = field(default_factory=count)

    async def do(self, op: str, engine_id: str, *arguments: Any) -> Any:
        """Have an engine do something; raises `KVBusError` when it cannot."""
        line = msgspec.json.encode([op, engine_id, arguments]).decode()
        async with self.lock:
            answer = msgspec.json.decode(await ask(self.process, line))
        if "error" in answer:
            raise KVBusError(answer["error"])
        return answer["reply"]

    def request(self, tables: PairedBlocks) -> tuple[str, int, list[int]]:
        """A request id that was never used, its tokens and blocks."""
        return f"request-{next(self.numbers)}", tables.num_tokens, tables.prefill.tolist()


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill engine of shape ``source`` and a decode engine of ``shape``, ready and attached."""

    shape: Shape
    source: Shape
    num_source_blocks: int
    engine_id: str
    caches: Sequence[KvCache]
    session: DecodeSession
    host: HostDecode | None
    prefill: PrefillEngines

    async def offer_all(self, tables: list[PairedBlocks]) -> list[Ticket]:
        """Have the prefill engine offer each of ``tables`` as a request of its own."""
        requests = [self.prefill.request(one) for one in tables]
        body = {request_id: (tokens, blocks) for request_id, tokens, blocks in requests}
        tickets: list[Ticket] = await self.prefill.do("offer", self.engine_id, body)
        return tickets

    async def publish(self, tables: PairedBlocks) -> Ticket:
        """Have the prefill engine offer what it has computed, by way of its ring if it has one.

        Answers once the offer is made; what goes through a ring is saved meanwhile.
        """
        request = self.prefill.request(tables)
        ticket: Ticket = await self.prefill.do("save", self.engine_id, *request)
        return ticket

    async def compute(self, tables: PairedBlocks, num_chunks: int, chunk_s: float) -> Ticket:
        """Start a prefill in chunks, offered while it goes on."""
        request = self.prefill.request(tables)
        chunks = num_chunks, chunk_s
        ticket: Ticket = await self.prefill.do("compute", self.engine_id, *request, *chunks)
        return ticket

    async def fetch(self, ticket: Ticket, tables: PairedBlocks) -> TimedFetch:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        reader = self.host or self.session
        began = time.perf_counter()
        fetch = reader.fetch(ticket, num_tokens=tables.num_tokens, block_ids={GROUP: tables.decode})
        fetched = await fetch.completed()
        return TimedFetch(time.perf_counter() - began, fetched)

    async def hand_off(self, tables: PairedBlocks) -> TimedFetch:
        """Offer and fetch; only the fetch is timed."""
        return await self.fetch(await self.publish(tables), tables)

    async def settle(self) -> list[float]:
        """Wait until no offer is live; seconds from offer to release of those that ended."""
        return [released_at - ready_at for ready_at, released_at in await self.ended()]

    async def ended(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; when those that ended were ready, and when released."""
        ended: list[tuple[float, float]] = await self.prefill.do("settle", self.engine_id)
        return ended

    async def verify(self, tables: PairedBlocks) -> None:
        """Do one handoff and compare every byte; the peers are warm after it."""
        wipe(self.caches)
        await self.hand_off(tables)
        blocks = self.num_source_blocks
        if not arrived(self.caches, self.shape, self.source, tables, num_source_blocks=blocks):
            raise KVBusError(
                f"a handoff from '{self.source.name}' to '{self.shape.name}' brought wrong bytes"
            )
        await self.settle()


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs: two agents, the prefill engines' process, and this one."""

    prefill_agent: BenchAgent
    decode_agent: BenchAgent
    prefill: PrefillEngines
    folder: Path

    @contextlib.asynccontextmanager
    async def engines(self, shape: Shape, num_blocks: int) -> AsyncIterator[EnginePair]:
        """Engines of one shape with caches of ``num_blocks`` blocks, until the block ends."""
        async with (
            self.source(shape, num_blocks) as engine_id,
            self.reader(shape, num_blocks, engine_id, (shape, num_blocks)) as pair,
        ):
            yield pair

    @contextlib.asynccontextmanager
    async def source(self, shape: Shape, num_blocks: int) -> AsyncIterator[str]:
        """A prefill engine, by its id, with a cache full of the pattern."""
        engine_id = f"{shape.name}-{next(self.prefill.numbers)}"
        await self.prefill.do("open", engine_id, shape.name, num_blocks)
        yield engine_id
        await self.prefill.do("close", engine_id)

    @contextlib.asynccontextmanager
    async def reader(
        self,
        shape: Shape,
        num_blocks: int,
        engine_id: str,
        source: tuple[Shape, int],
        *,
        agent: BenchAgent | None = None,
    ) -> AsyncIterator[EnginePair]:
        """A decode engine beside ``agent`` that reads prefill engine ``engine_id``.

        ``source`` are the shape and number of blocks of that one.
        """
        path = (agent or self.decode_agent).attach_path
        spec = shape.spec(f"decode-{next(self.prefill.numbers)}")
        session = DecodeSession(path, spec, attach_timeout_s=ATTACH_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(session)
            ranks = await open_ranks(stack, path, spec, shape, num_blocks)
            await session.register()
            await session.ready()
            host: HostDecode | None = None
            if ranks.ring is not None:
                host = await stack.enter_async_context(HostDecode(session, *ranks.ring))
            yield EnginePair(shape, *source, engine_id, ranks.caches, session, host, self.prefill)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each process, this one as the decode engine."""
        return {
            "prefill agent": cpu_s(self.prefill_agent.pid),
            "decode agent": cpu_s(self.decode_agent.pid),
            "prefill engine": cpu_s(self.prefill.process.pid),
            "decode engine": time.process_time(),
        }


@contextlib.contextmanager
def running_bench(prefill: BenchAgent, decode: BenchAgent, folder: Path) -> Iterator[Bench]:
    """Start the prefill engines' process beside agents that run."""
    log = folder / "prefill-engine.log"
    module, attach_path = "kvbus.bench.prefill_engine", str(prefill.attach_path)
    with running(module, attach_path, log=log) as process:
        yield Bench(prefill, decode, PrefillEngines(process), folder)
