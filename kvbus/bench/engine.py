"""Engines of the benchmark: caches of a shape, full of a pattern, behind a link with an agent.

What is timed runs in the thread of the link (`Engine.run`), so that no figure has the way from
another thread in it. The planner is not trusted: what is compared are views and block ids alone.
A device that no agent maps is private memory of one rank, copied to and from a ring in whole
blocks.

    python -m kvbus.bench.engine ATTACH_SOCKET    prefill engines, which do what lines ask for

A line of JSON is ``[op, engine_id, arguments]``, the answer ``{"reply": …}`` or ``{"error": …}``.

Axes
    block, slot, head   of the rank's cache; heads have their numbers in the model
    word                8 bytes of a head, or of a block
"""

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvbus.bench.shapes import GROUP, SHAPES, PairedBlocks, Shape
from kvbus.engine import AgentRole, Fetched, KvCache, Link, Offer, RankMemory
from kvbus.engine.bounce import (
    CopyBlocks,
    Direction,
    HostBlocks,
    HostBuffer,
    HostDecode,
    HostOffer,
    HostPool,
    HostPrefill,
    LocalCopier,
)
from kvbus.errors import FetchFailed, GeometryError, KVBusError, RequestRefused, leaves

Ticket = Mapping[str, Any]
T = TypeVar("T")

ATTACH_TIMEOUT_S = 30.0
WORD_BYTES = 8
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class Engine:
    """An engine with ``num_blocks`` blocks, attached within ``with`` or ``async with``.

    A ring has half the blocks: the requests of the benchmark use every other one.
    """

    role: AgentRole

    def __init__(
        self,
        attach_path: str | Path,
        engine_id: str,
        shape: Shape,
        num_blocks: int,
        *,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
    ) -> None:
        spec, self.shape = shape.spec(engine_id), shape
        self.ring: tuple[HostPool, LocalCopier] | None = None
        if shape.host:
            torch.set_num_threads(1)  # else each block's copy waits for another thread to be woken
            (rank,), device = shape.ranks(num_blocks), device_blocks(shape, num_blocks)
            pool = HostPool({GROUP: max(1, num_blocks // 2)})
            buffer = HostBuffer(spec, rank.rank, pool.num_blocks)
            self.ring = pool, LocalCopier([buffer], block_copy(device))
            memories = [buffer.memory]
            self._caches = [KvCache(spec, rank, device.flatten().view(torch.uint8))]
        else:
            memories = [
                RankMemory.allocate(spec, rank, shape.layout, num_blocks=num_blocks)
                for rank in range(spec.num_ranks)
            ]
            self._caches = [KvCache(spec, one.rank, one.tensor) for one in memories]
        self.link = Link(
            attach_path, spec, memory=memories, role=self.role, attach_timeout_s=attach_timeout_s
        )
        self._loop: Future[asyncio.AbstractEventLoop] = Future()

    def __enter__(self) -> Self:
        self.link.__enter__()
        self._begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.link.close()

    async def __aenter__(self) -> Self:
        await self.link.__aenter__()
        self._begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.link.__aexit__(*exc)

    def _begin(self) -> None:
        self.link.post(lambda: self._loop.set_result(asyncio.get_running_loop()))

    def start(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have ``call`` run in the thread of the link."""
        return asyncio.run_coroutine_threadsafe(call, self._loop.result())

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The same, and wait for it; it may be called there, too."""
        if asyncio.get_running_loop() is self._loop.result():
            return await call
        return await asyncio.wrap_future(self.start(call))

    def fill(self) -> None:
        """Write the pattern to all ranks."""
        for number, heads, words in self._parts():
            blocks, slots = (torch.arange(size) for size in words.shape[:2])
            words.copy_(_pattern(number, blocks[:, None], slots, heads=heads, num=words.shape[3]))

    def wipe(self) -> None:
        """Zero the caches, so that old bytes cannot pass for new ones."""
        for _, _, words in self._parts():
            words.zero_()

    def has(self, tables: PairedBlocks, source: Shape) -> bool:
        """Whether the tokens of ``tables`` are those of an engine of ``source`` that was filled."""
        positions = torch.arange(tables.num_tokens)
        prefill, decode = torch.from_numpy(tables.prefill), torch.from_numpy(tables.decode)
        blocks, slots = prefill[positions // source.block_size], positions % source.block_size
        return all(
            torch.equal(
                words[decode[positions // words.shape[1]], positions % words.shape[1]],
                _pattern(number, blocks, slots, heads=heads, num=words.shape[3]),
            )
            for number, heads, words in self._parts()
        )

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """A number, the heads and the words [block, slot, head, word] of each part of a layer."""
        for cache in self._caches:
            for region in cache.rank.regions:
                heads = torch.arange(region.first_head, region.first_head + region.num_heads)
                for layer, (at, part) in product(region.layers, enumerate(region.parts)):
                    yield layer << 1 | at, heads, cache.view(layer, part).view(torch.int64)


def _pattern(number: int, blocks: Tensor, slots: Tensor, *, heads: Tensor, num: int) -> Tensor:
    """[..., head, word]: what belongs into these slots, no two words of a model alike."""
    rows = ((number << 24 | blocks) << 8 | slots)[..., None, None]
    numbers = rows << 16 | heads[:, None] << 8 | torch.arange(num)
    return numbers.add_(1).mul_(_FACTOR)


def device_blocks(shape: Shape, num_blocks: int) -> Tensor:
    """Memory of this process alone, its pages present: [block, word]."""
    return torch.empty(num_blocks, shape.block_bytes // WORD_BYTES, dtype=torch.int64).zero_()


def block_copy(device: Tensor) -> CopyBlocks:
    """Copies whole blocks of ``device``."""

    def copy(blocks: HostBlocks, ring: Tensor, direction: Direction) -> None:
        slots = ring.reshape(len(ring), -1).view(torch.int64)
        if slots.shape[1] != device.shape[1]:
            raise GeometryError("the benchmark's device copies whole blocks only")
        ids = torch.from_numpy(blocks.ids.astype(np.int64))
        if direction is Direction.SAVE:
            torch.index_select(device, 0, ids, out=slots)
        else:
            torch._foreach_copy_([device[block_id] for block_id in ids.tolist()], list(slots))

    return copy


@dataclass(frozen=True, slots=True)
class TimedFetch:
    """One handoff as the decode engine saw it: from its call of `fetch` to its end."""

    began_at: float
    ended_at: float
    fetched: Fetched

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.began_at


class DecodeEngine(Engine):
    """Fetches what is offered."""

    role = AgentRole.DECODE

    def _begin(self) -> None:
        super()._begin()
        self._fetching = HostDecode(self.link, *self.ring) if self.ring else self.link

    async def fetch(self, ticket: Ticket, tables: PairedBlocks, priority: int = 0) -> TimedFetch:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        return await self.run(self._fetch(ticket, tables, priority))

    async def _fetch(self, ticket: Ticket, tables: PairedBlocks, priority: int) -> TimedFetch:
        began, block_ids = time.perf_counter(), {GROUP: tables.decode}
        fetch = self._fetching.fetch(
            ticket, num_tokens=tables.num_tokens, block_ids=block_ids, priority=priority
        )
        try:
            fetched = await fetch.ended
        except FetchFailed:
            with suppress(KVBusError):  # then the offer ends by its time to live
                await fetch.cancel(release_offer=True)
            raise
        return TimedFetch(began, time.perf_counter(), fetched)


class PrefillEngine(Engine):
    """Offers blocks of a cache that is full of the pattern; its coroutines are for `run`."""

    role = AgentRole.PREFILL

    def _begin(self) -> None:
        super()._begin()
        self.fill()
        self._host = HostPrefill(self.link, *self.ring) if self.ring else None
        self._ready_at: dict[Offer | HostOffer, float] = {}
        """When the last tokens of each live offer were ready."""
        self._ended: list[tuple[float, float]] = []
        self._settled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def offer(self, requests: Sequence[tuple[str, int, list[int]]]) -> list[Ticket]:
        """Several offers at once, as after one step of an engine.

        Answers once all are made; what goes through a ring is saved meanwhile.
        """
        began = time.perf_counter()
        if self._host is not None:
            return [await self._offer_ring(self._host, *request) for request in requests]
        offers = [
            self.link.offer(request_id, num_tokens=num_tokens, block_ids={GROUP: blocks})
            for request_id, num_tokens, blocks in requests
        ]
        for offer in offers:
            await offer
            self._note(offer, began)
        return [offer.ticket for offer in offers]

    async def _offer_ring(
        self, host: HostPrefill, request_id: str, num_tokens: int, blocks: list[int]
    ) -> Ticket:
        began, offer = time.perf_counter(), await host.begin(request_id, num_tokens=num_tokens)

        async def save() -> None:
            await offer.save(num_tokens, {GROUP: blocks})
            await offer.seal()

        self._start(save())
        ticket = await offer.offer()
        self._note(offer, began)
        return ticket

    async def compute(
        self, request_id: str, num_tokens: int, blocks: list[int], num_chunks: int, chunk_s: float
    ) -> Ticket:
        """An open offer of no tokens yet; a chunk of them is ready every ``chunk_s``."""
        offer = await self.link.offer(
            request_id, num_tokens=0, block_ids={GROUP: blocks}, sealed=False
        )
        self._note(offer, time.perf_counter())

        async def extend() -> None:
            with suppress(RequestRefused):
                for chunk in range(1, num_chunks + 1):
                    await asyncio.sleep(chunk_s)
                    if offer.ended.done():
                        return
                    self._ready_at[offer] = time.perf_counter()
                    await offer.extend(num_tokens * chunk // num_chunks)
                await offer.seal()

        self._start(extend())
        return offer.ticket

    async def settle(self) -> list[tuple[float, float]]:
        """Wait until no offer is live; of those that ended since, when ready and when released."""
        while self._ready_at:
            self._settled.clear()
            await self._settled.wait()
        ended, self._ended = self._ended, []
        return ended

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note(self, offer: Offer | HostOffer, ready_at: float) -> None:
        self._ready_at[offer] = ready_at
        offer.ended.add_callback(partial(self._on_ended, offer))

    def _on_ended(self, offer: Offer | HostOffer) -> None:
        self._ended.append((self._ready_at.pop(offer), time.perf_counter()))
        if not self._ready_at:
            self._settled.set()


def serve(attach_path: str) -> None:
    """Do what the lines of stdin say, until it ends."""
    engines: dict[str, PrefillEngine] = {}
    for line in sys.stdin.buffer:
        op, engine_id, arguments = msgspec.json.decode(line)
        answer: dict[str, Any] = {"reply": None}
        try:
            if op == "open":
                shape, num_blocks = SHAPES[arguments[0]], arguments[1]
                engine = PrefillEngine(attach_path, engine_id, shape, num_blocks)
                engines[engine_id] = engine.__enter__()
            elif op == "close":
                engines.pop(engine_id).link.close()
            else:
                call = getattr(engines[engine_id], op)(*arguments)
                answer["reply"] = engines[engine_id].start(call).result()
        except* KVBusError as errors:
            answer = {"error": str(leaves(errors)[0])}
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    for engine in engines.values():
        engine.link.close()


if __name__ == "__main__":
    serve(sys.argv[1])
