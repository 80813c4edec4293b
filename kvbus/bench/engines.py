"""The decode engine of the benchmark, in this process, and its line to the prefill engine's.

Refuses wrong bytes: a handoff that did not bring the pattern is an error.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from kvbus.bench.agents import BenchAgent
from kvbus.bench.commands import (
    AwaitEnded,
    CloseEngine,
    ComputeRequest,
    OfferRequests,
    OpenEngine,
    SaveRequest,
)
from kvbus.bench.pattern import arrived, wipe
from kvbus.bench.processes import cpu_s, running
from kvbus.bench.ranks import ATTACH_TIMEOUT_S, open_ranks
from kvbus.bench.shapes import GROUP, Shape, Tables
from kvbus.bus import BusContext, RequestClient, new_boot_id, new_context
from kvbus.engine import DecodeSession, KvCache
from kvbus.engine.bounce import HostDecode
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Fetched

COMMAND_TIMEOUT_S = 120.0

Ticket = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Handoff:
    """One handoff as the decode engine saw it."""

    seconds: float
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill engine of shape ``source`` and a decode engine of ``shape``, ready and attached."""

    shape: Shape
    source: Shape
    num_source_blocks: int
    engine_id: str
    caches: Sequence[KvCache]
    decode: DecodeSession | HostDecode
    _line: RequestClient
    _requests: "count[int]" = field(default_factory=count)

    @property
    def decode_session(self) -> DecodeSession:
        """The session with the decode agent."""
        return self.decode.session if isinstance(self.decode, HostDecode) else self.decode

    async def offer_all(self, tables: list[Tables]) -> list[Ticket]:
        """Have the prefill engine offer each of ``tables`` as a request of its own."""
        requests = {
            f"request-{next(self._requests)}": (t.num_tokens, t.prefill.tolist()) for t in tables
        }
        message = OfferRequests(engine_id=self.engine_id, requests=requests)
        reply = await self._line.ask(message, timeout_s=COMMAND_TIMEOUT_S)
        return [reply.tickets[request_id] for request_id in requests]

    async def fetch(self, ticket: Ticket, tables: Tables) -> Handoff:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        blocks = {GROUP: tables.decode}
        began = time.perf_counter()
        fetch = self.decode.fetch(ticket, num_tokens=tables.num_tokens, block_ids=blocks)
        fetched = await fetch.completed()
        return Handoff(time.perf_counter() - began, fetched)

    async def hand_off(self, tables: Tables) -> Handoff:
        """Offer and fetch; only the fetch is timed."""
        return await self.fetch(await self.publish(tables), tables)

    async def publish(self, tables: Tables) -> Ticket:
        """Have the prefill engine offer what it has computed, by way of its ring if it has one.

        Answers once the offer is made; what goes through a ring is saved meanwhile.
        """
        if not self.source.host:
            (ticket,) = await self.offer_all([tables])
            return ticket
        message = SaveRequest(
            engine_id=self.engine_id,
            request_id=f"request-{next(self._requests)}",
            blocks=tables.prefill.tolist(),
            num_tokens=tables.num_tokens,
        )
        reply = await self._line.ask(message, timeout_s=COMMAND_TIMEOUT_S)
        return reply.tickets[message.request_id]

    async def compute(self, tables: Tables, num_chunks: int, chunk_s: float) -> Ticket:
        """Start a prefill in chunks, offered while it goes on."""
        message = ComputeRequest(
            engine_id=self.engine_id,
            request_id=f"request-{next(self._requests)}",
            blocks=tables.prefill.tolist(),
            num_tokens=tables.num_tokens,
            num_chunks=num_chunks,
            chunk_s=chunk_s,
        )
        reply = await self._line.ask(message, timeout_s=COMMAND_TIMEOUT_S)
        return reply.tickets[message.request_id]

    async def settle(self) -> list[float]:
        """Wait until no offer is live; seconds from offer to release of those that ended."""
        return [released_at - ready_at for ready_at, released_at in await self._ended()]

    async def ready_times(self) -> list[float]:
        """Wait until no offer is live; when those that ended were ready, as `perf_counter`."""
        return [ready_at for ready_at, _ in await self._ended()]

    async def _ended(self) -> list[tuple[float, float]]:
        message = AwaitEnded(engine_id=self.engine_id)
        ended = await self._line.ask(message, timeout_s=COMMAND_TIMEOUT_S)
        return list(ended.times.values())

    async def verify(self, tables: Tables) -> None:
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
    """Everything that runs: two agents, the prefill engine's process, and this one."""

    prefill_agent: BenchAgent
    decode_agent: BenchAgent
    context: BusContext
    folder: Path
    prefill_engine_pid: int
    _line: RequestClient
    _names: "count[int]" = field(default_factory=count)

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
        engine_id = f"{shape.name}-{next(self._names)}"
        message = OpenEngine(engine_id=engine_id, shape=shape.name, num_blocks=num_blocks)
        await self._line.ask(message, timeout_s=COMMAND_TIMEOUT_S)
        yield engine_id
        await self._line.ask(CloseEngine(engine_id=engine_id), timeout_s=COMMAND_TIMEOUT_S)

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
        spec = shape.spec(f"decode-{next(self._names)}")
        decode = DecodeSession(path, spec, attach_timeout_s=ATTACH_TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(decode)
            ranks = await open_ranks(stack, path, spec, shape, num_blocks)
            await decode.register()
            await decode.ready()
            reader: DecodeSession | HostDecode = decode
            if ranks.ring is not None:
                host = HostDecode(decode, ranks.ring.blocks, ranks.ring.copier)
                reader = await stack.enter_async_context(host)
            yield EnginePair(shape, *source, engine_id, ranks.caches, reader, self._line)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each process, this one as the decode engine."""
        return {
            "prefill agent": self.prefill_agent.cpu_s(),
            "decode agent": self.decode_agent.cpu_s(),
            "prefill engine": cpu_s(self.prefill_engine_pid),
            "decode engine": time.process_time(),
        }


@contextlib.asynccontextmanager
async def prefill_engine(
    prefill: BenchAgent, decode: BenchAgent, folder: Path
) -> AsyncIterator[Bench]:
    """Start the prefill engine's process beside agents that run."""
    endpoint = f"ipc://{folder / 'prefill-engine.sock'}"
    with (
        running(
            "kvbus.bench.prefill_engine",
            str(prefill.attach_path),
            endpoint,
            log=folder / "prefill-engine.log",
        ) as process,
        new_context() as context,
    ):
        line = RequestClient(context, endpoint, boot=new_boot_id())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(line.run)
            yield Bench(prefill, decode, context, folder, process.pid, line)
            tasks.cancel_scope.cancel()
