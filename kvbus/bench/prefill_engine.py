"""The prefill engine of the benchmark: a process that offers blocks when a line asks it to.

Its caches are filled with a pattern once. A line of JSON is ``[op, engine_id, arguments]``, the
answer ``{"reply": …}`` or ``{"error": message}``.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from kvbus.bench.caches import ATTACH_TIMEOUT_S, fill_ranks, open_caches
from kvbus.bench.shapes import GROUP, SHAPES
from kvbus.engine import Offer, PrefillSession
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError, leaves
from kvbus.protocol.engine import Released

Ticket = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class SourceEngine:
    """One engine; ``ended`` are the offers that ended since they were last told.

    Of each, when its last tokens were ready, and when it was released.
    """

    tasks: TaskGroup
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    control: PrefillSession = field(init=False)
    host: HostPrefill | None = None
    ready_at: dict[str, float] = field(default_factory=dict)
    ended: list[tuple[float, float]] = field(default_factory=list)
    settled: anyio.Event = field(default_factory=anyio.Event)

    async def open(
        self, attach_path: str, engine_id: str, shape_name: str, num_blocks: int
    ) -> None:
        """Attach, and fill the cache."""
        shape = SHAPES[shape_name]
        spec = shape.spec(engine_id)
        self.control = PrefillSession(
            attach_path, spec, attach_timeout_s=ATTACH_TIMEOUT_S, on_released=self._on_released
        )
        await self.stack.enter_async_context(self.control)
        caches, ring = await open_caches(self.stack, attach_path, spec, shape, num_blocks)
        fill_ranks(caches, shape)
        self.host = HostPrefill(self.control, *ring) if ring else None
        await self.control.register()
        await self.control.ready()

    async def close(self) -> None:
        """End the sessions; the engine that was opened last comes first."""
        await self.stack.aclose()

    async def offer(self, requests: Sequence[tuple[str, int, list[int]]]) -> list[Ticket]:
        """Several offers at once, as after one step of an engine."""
        tickets: dict[str, Ticket] = {}
        make = self._offer if self.host is None else self._save
        async with anyio.create_task_group() as offers:
            for request in requests:
                offers.start_soon(make, tickets, *request)
        return [tickets[request_id] for request_id, *_ in requests]

    async def compute(
        self,
        request_id: str,
        num_tokens: int,
        blocks: list[int],
        num_chunks: int,
        chunk_s: float,
    ) -> Ticket:
        """An open offer of no tokens yet; a chunk of them is ready every ``chunk_s``."""
        offer = await self.control.offer(
            request_id, num_tokens=0, block_ids={GROUP: blocks}, sealed=False
        )
        self.ready_at[offer.offer_id] = time.perf_counter()
        self.tasks.start_soon(self._extend, offer, num_tokens, num_chunks, chunk_s)
        return offer.ticket

    async def settle(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; what has ended by then."""
        while self.ready_at:
            self.settled = anyio.Event()
            await self.settled.wait()
        ended, self.ended = self.ended, []
        return ended

    async def _offer(
        self, tickets: dict[str, Ticket], request_id: str, num_tokens: int, blocks: list[int]
    ) -> None:
        began, block_ids = time.perf_counter(), {GROUP: blocks}
        offer = await self.control.offer(request_id, num_tokens=num_tokens, block_ids=block_ids)
        self.ready_at[offer.offer_id] = began
        tickets[request_id] = offer.ticket

    async def _save(
        self, tickets: dict[str, Ticket], request_id: str, num_tokens: int, blocks: list[int]
    ) -> None:
        """An offer that goes through the ring, which is saved from here on."""
        if self.host is not None:
            offer = await self.host.begin(request_id, num_tokens=num_tokens)
            self.tasks.start_soon(_save_all, offer, num_tokens, blocks)
            tickets[request_id] = await offer.offer()
            self.ready_at[offer.offer_id] = time.perf_counter()

    async def _extend(self, offer: Offer, num_tokens: int, num_chunks: int, chunk_s: float) -> None:
        for chunk in range(1, num_chunks + 1):
            await anyio.sleep(chunk_s)
            self.ready_at[offer.offer_id] = time.perf_counter()
            await offer.extend(num_tokens * chunk // num_chunks)
        await offer.seal()

    def _on_released(self, released: Released) -> None:
        ready_at = self.ready_at.pop(released.offer_id)
        self.ended.append((ready_at, time.perf_counter()))
        if not self.ready_at:
            self.settled.set()


async def _save_all(offer: HostOffer, num_tokens: int, blocks: list[int]) -> None:
    await offer.save(num_tokens, {GROUP: blocks})
    await offer.seal()


async def serve(attach_path: str) -> None:
    """Answer lines until the parent closes this process's stdin."""
    engines: dict[str, SourceEngine] = {}
    async with anyio.create_task_group() as tasks:
        read = partial(anyio.to_thread.run_sync, sys.stdin.buffer.readline, abandon_on_cancel=True)
        while line := await read():
            op, engine_id, arguments = msgspec.json.decode(line)
            if op == "open":
                engines[engine_id] = SourceEngine(tasks)
                arguments = attach_path, engine_id, *arguments
            try:
                answer = {"reply": await getattr(engines[engine_id], op)(*arguments)}
            except* KVBusError as errors:
                answer = {"error": str(leaves(errors)[0])}
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
        for engine in reversed(engines.values()):
            await engine.close()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1])
