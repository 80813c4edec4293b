"""The decode engine of the benchmark, in this process, and its line to the prefill engine's.

Refuses wrong bytes: a handoff that did not bring the pattern is an error.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from kvbus.bench.agents import BenchAgent
from kvbus.bench.pattern import arrived, wipe
from kvbus.bench.processes import cpu_s, running
from kvbus.bench.shapes import GROUP, Shape, Tables
from kvbus.bus import BusContext, RequestClient, new_boot_id, new_context
from kvbus.engine import DecodeSession, KvCache, MemorySession
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Fetched

ATTACH_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 120.0

Ticket = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Handoff:
    """One handoff as the decode engine saw it."""

    seconds: float
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class EnginePair:
    """A prefill and a decode engine of one shape, ready and attached."""

    shape: Shape
    engine_id: str
    cache: KvCache
    decode: DecodeSession
    _line: RequestClient
    _requests: "count[int]" = field(default_factory=count)

    async def offer_all(self, tables: list[Tables]) -> list[Ticket]:
        """Have the prefill engine offer each of ``tables`` as a request of its own."""
        requests = {f"request-{next(self._requests)}": t.prefill.tolist() for t in tables}
        body = {"engine_id": self.engine_id, "requests": requests}
        reply = await self._line.request("offer", body, timeout_s=COMMAND_TIMEOUT_S)
        return [reply[request_id] for request_id in requests]

    async def fetch(self, ticket: Ticket, tables: Tables) -> Handoff:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        blocks = {GROUP: tables.decode}
        began = time.perf_counter()
        fetch = self.decode.fetch(ticket, num_tokens=tables.num_tokens, block_ids=blocks)
        fetched = await fetch.completed()
        return Handoff(time.perf_counter() - began, fetched)

    async def hand_off(self, tables: Tables) -> Handoff:
        """Offer and fetch; only the fetch is timed."""
        (ticket,) = await self.offer_all([tables])
        return await self.fetch(ticket, tables)

    async def settle(self) -> list[float]:
        """Wait until no offer is live; seconds from offer to release of those that ended."""
        body = {"engine_id": self.engine_id}
        reply = await self._line.request("settle", body, timeout_s=COMMAND_TIMEOUT_S)
        return list(reply.values())

    async def verify(self, tables: Tables) -> None:
        """Do one handoff and compare every byte; the peers are warm after it."""
        wipe(self.cache)
        await self.hand_off(tables)
        if not arrived(self.cache, tables.prefill, tables.decode):
            raise KVBusError(f"a handoff into '{self.shape.name}' brought wrong bytes")
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
        """Engines with caches of ``num_blocks`` blocks, until the block ends."""
        engine_id = f"{shape.name}-{next(self._names)}"
        body = {"engine_id": engine_id, "shape": shape.name, "num_blocks": num_blocks}
        await self._line.request("open", body, timeout_s=COMMAND_TIMEOUT_S)
        path, spec = self.decode_agent.attach_path, shape.spec(engine_id)
        async with (
            MemorySession(path, spec, 0, attach_timeout_s=ATTACH_TIMEOUT_S) as memory,
            DecodeSession(path, spec, attach_timeout_s=ATTACH_TIMEOUT_S) as decode,
        ):
            cache = await memory.allocate(shape.layout, num_blocks=num_blocks)
            await decode.register()
            await decode.ready()
            yield EnginePair(shape, engine_id, cache, decode, self._line)
        await self._line.request("close", {"engine_id": engine_id}, timeout_s=COMMAND_TIMEOUT_S)

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
