"""The prefill engine of the benchmark: a process that offers blocks when a line asks it to.

Its caches are filled with a pattern once. A line of JSON is ``[op, engine_id, arguments]``, the
answer ``{"reply": …}`` or ``{"error": message}``.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from kvbus.bench.arrival import fill_ranks
from kvbus.bench.ranks import ATTACH_TIMEOUT_S, open_ranks
from kvbus.bench.shapes import GROUP, SHAPES
from kvbus.engine import Offer, PrefillSession
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError
from kvbus.protocol.engine import Released

Ticket = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class SourceEngine:
    """One engine; ``ended`` are the offers that ended since they were last told.

    Of each, when its last tokens were ready, and when it was released.
    """

    tasks: TaskGroup
    control: PrefillSession = field(init=False)
    host: HostPrefill | None = None
    ready_at: dict[str, float] = field(default_factory=dict)
    ended: dict[str, tuple[float, float]] = field(default_factory=dict)
    settled: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    closed: anyio.Event = field(default_factory=anyio.Event)

    async def run(
        self,
        attach_path: str,
        engine_id: str,
        shape_name: str,
        num_blocks: int,
        *,
        task_status: TaskStatus[None],
    ) -> None:
        """Attach, fill the cache, and stay until the scope is cancelled."""
        shape = SHAPES[shape_name]
        spec = shape.spec(engine_id)
        self.control = PrefillSession(
            attach_path, spec, attach_timeout_s=ATTACH_TIMEOUT_S, on_released=self._on_released
        )
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self.control)
                ranks = await open_ranks(stack, attach_path, spec, shape, num_blocks)
                fill_ranks(ranks.caches, shape)
                if ranks.ring is not None:
                    self.host = HostPrefill(self.control, *ranks.ring)
                await self.control.register()
                await self.control.ready()
                task_status.started()
                with self.scope:
                    await anyio.sleep_forever()
        finally:
            self.closed.set()

    async def offer(self, requests: Mapping[str, tuple[int, list[int]]]) -> list[Ticket]:
        """Several offers at once, as after one step of an engine."""
        tickets: dict[str, Ticket] = {}

        async def offer(request_id: str, num_tokens: int, blocks: list[int]) -> None:
            began = time.perf_counter()
            made = await self.control.offer(
                request_id, num_tokens=num_tokens, block_ids={GROUP: blocks}
            )
            self.ready_at[made.offer_id] = began
            tickets[request_id] = made.ticket

        async with anyio.create_task_group() as offers:
            for request_id, (num_tokens, blocks) in requests.items():
                offers.start_soon(offer, request_id, num_tokens, blocks)
        return [tickets[request_id] for request_id in requests]

    async def save(self, request_id: str, num_tokens: int, blocks: list[int]) -> Ticket:
        """An offer that goes through the ring, which is saved from here on."""
        if self.host is None:
            return (await self.offer({request_id: (num_tokens, blocks)}))[0]
        offer = await self.host.begin(request_id, num_tokens=num_tokens)
        self.tasks.start_soon(self._save, offer, num_tokens, blocks)
        ticket = await offer.offer()
        self.ready_at[offer.offer_id] = time.perf_counter()
        return ticket

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
        self.tasks.start_soon(self._compute, offer, num_tokens, num_chunks, chunk_s)
        return offer.ticket

    async def settle(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; what has ended by then."""
        while self.ready_at:
            self.settled = anyio.Event()
            await self.settled.wait()
        ended, self.ended = self.ended, {}
        return list(ended.values())

    async def close(self) -> None:
        """End the sessions."""
        self.scope.cancel()
        await self.closed.wait()

    @staticmethod
    async def _save(offer: HostOffer, num_tokens: int, blocks: list[int]) -> None:
        await offer.save(num_tokens, {GROUP: blocks})
        await offer.seal()

    async def _compute(
        self, offer: Offer, num_tokens: int, num_chunks: int, chunk_s: float
    ) -> None:
        for chunk in range(1, num_chunks + 1):
            await anyio.sleep(chunk_s)
            self.ready_at[offer.offer_id] = time.perf_counter()
            await offer.extend(num_tokens * chunk // num_chunks)
        await offer.seal()

    def _on_released(self, released: Released) -> None:
        ready_at = self.ready_at.pop(released.offer_id)
        self.ended[released.offer_id] = ready_at, time.perf_counter()
        if not self.ready_at:
            self.settled.set()


async def serve(attach_path: str) -> None:
    """Answer lines until the parent closes this process's stdin."""
    engines: dict[str, SourceEngine] = {}
    async with anyio.create_task_group() as tasks:
        read = partial(anyio.to_thread.run_sync, sys.stdin.buffer.readline, abandon_on_cancel=True)
        while line := await read():
            op, engine_id, arguments = msgspec.json.decode(line)
            if op == "open":
                engine = engines[engine_id] = SourceEngine(tasks)
                step = partial(tasks.start, engine.run, attach_path, engine_id, *arguments)
            else:
                step = partial(getattr(engines[engine_id], op), *arguments)
            try:
                answer = {"reply": await step()}
            except KVBusError as error:
                answer = {"error": str(error)}
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(serve, sys.argv[1])
