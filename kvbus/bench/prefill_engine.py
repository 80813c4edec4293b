"""The prefill engine of the benchmark: a process that offers blocks when a line asks it to.

Its caches are filled with a pattern once. A line of JSON is ``[op, engine_id, arguments]``, the
answer ``{"reply": …}`` or ``{"error": message}``.
"""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from kvbus.bench.caches import ATTACH_TIMEOUT_S, fill, open_caches
from kvbus.bench.shapes import GROUP, SHAPES
from kvbus.engine import Offer, PrefillSession
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError, RequestRefused, leaves

Ticket = Mapping[str, Any]


class SourceEngine:
    """One engine; its methods are the ops."""

    def __init__(self, tasks: TaskGroup, attach_path: str, engine_id: str) -> None:
        self._tasks, self._attach_path, self._engine_id = tasks, attach_path, engine_id
        self._stack = AsyncExitStack()
        self._ready_at: dict[str, float] = {}
        """When the last tokens of each live offer were ready."""
        self._ended: list[tuple[float, float]] = []
        self._settled = anyio.Event()

    async def open(self, shape_name: str, num_blocks: int) -> None:
        """Attach, and fill the cache."""
        shape = SHAPES[shape_name]
        spec, path = shape.spec(self._engine_id), self._attach_path
        self._control = await self._stack.enter_async_context(
            PrefillSession(path, spec, attach_timeout_s=ATTACH_TIMEOUT_S)
        )
        caches, ring = await open_caches(self._stack, path, spec, shape, num_blocks)
        fill(caches)
        self._host = HostPrefill(self._control, *ring) if ring else None
        await self._control.register()
        await self._control.ready()

    async def close(self) -> None:
        """End the sessions."""
        await self._stack.aclose()

    async def offer(self, requests: Sequence[tuple[str, int, list[int]]]) -> list[Ticket]:
        """Several offers at once, as after one step of an engine."""
        tickets: dict[str, Ticket] = {}
        async with anyio.create_task_group() as offers:
            for request in requests:
                offers.start_soon(self._offer, tickets, *request)
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
        offer = await self._control.offer(
            request_id, num_tokens=0, block_ids={GROUP: blocks}, sealed=False
        )
        self._note(offer, time.perf_counter())
        self._tasks.start_soon(self._extend, offer, num_tokens, num_chunks, chunk_s)
        return offer.ticket

    async def settle(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; of those that ended since, when ready and when released."""
        while self._ready_at:
            self._settled = anyio.Event()
            await self._settled.wait()
        ended, self._ended = self._ended, []
        return ended

    async def _offer(
        self, tickets: dict[str, Ticket], request_id: str, num_tokens: int, blocks: list[int]
    ) -> None:
        """By way of the ring, if there is one: then it is saved from here on."""
        began, block_ids = time.perf_counter(), {GROUP: blocks}
        offer: Offer | HostOffer
        if self._host is None:
            offer = await self._control.offer(
                request_id, num_tokens=num_tokens, block_ids=block_ids
            )
            tickets[request_id] = offer.ticket
        else:
            offer = await self._host.begin(request_id, num_tokens=num_tokens)
            self._tasks.start_soon(_save, offer, num_tokens, block_ids)
            tickets[request_id] = await offer.offer()
        self._note(offer, began)

    async def _extend(self, offer: Offer, num_tokens: int, num_chunks: int, chunk_s: float) -> None:
        """Until all of it is there, or nobody wants it any more."""
        with contextlib.suppress(RequestRefused):
            for chunk in range(1, num_chunks + 1):
                await anyio.sleep(chunk_s)
                if offer.ended.done():
                    return
                self._ready_at[offer.offer_id] = time.perf_counter()
                await offer.extend(num_tokens * chunk // num_chunks)
            await offer.seal()

    def _note(self, offer: Offer | HostOffer, ready_at: float) -> None:
        self._ready_at[offer.offer_id] = ready_at
        offer.ended.add_callback(partial(self._on_ended, offer.offer_id))

    def _on_ended(self, offer_id: str) -> None:
        self._ended.append((self._ready_at.pop(offer_id), time.perf_counter()))
        if not self._ready_at:
            self._settled.set()


async def _save(offer: HostOffer, num_tokens: int, block_ids: Mapping[str, list[int]]) -> None:
    await offer.save(num_tokens, block_ids)
    await offer.seal()


async def serve(attach_path: str) -> None:
    """Answer lines until the parent closes this process's stdin."""
    engines: dict[str, SourceEngine] = {}
    async with anyio.create_task_group() as tasks:
        read = partial(anyio.to_thread.run_sync, sys.stdin.buffer.readline, abandon_on_cancel=True)
        while line := await read():
            op, engine_id, arguments = msgspec.json.decode(line)
            if op == "open":
                engines[engine_id] = SourceEngine(tasks, attach_path, engine_id)
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
