"""The handoffs of a soak: streams between pairs of engines, of every path and many sizes.

A worker has blocks of its own on both sides, and uses them again and again.
"""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random

import anyio

from kvbus.bench.engines import UNMAPPED, Bench, EnginePair, Ticket
from kvbus.bench.shapes import (
    BIG,
    GROUP,
    HND_1,
    LAYERED,
    NHD_1,
    SMALL,
    PairedBlocks,
    Shape,
    scattered_tokens,
)
from kvbus.errors import FetchFailed, KVBusError
from tests.plain_sockets import ask

CHUNKS, CHUNK_S = 3, 0.002
CANCELS = 0.03


@dataclass(frozen=True, slots=True)
class Stream:
    """Handoffs between two engines, by the decode agent ``reader``.

    An offer that grows is read under a lease while it is computed, and never cancelled here: its
    engine extends it on. A small one that is sealed is read ahead of its lease.
    """

    source: Shape
    target: Shape
    reader: str
    most_blocks: int
    at_once: int = 1
    num_workers: int = 2
    grows: bool = False

    @property
    def num_blocks(self) -> int:
        """Of each cache."""
        return 2 * self.most_blocks * self.at_once * self.num_workers


STREAMS = (
    Stream(SMALL, SMALL, reader="mapped", most_blocks=1, at_once=32),
    Stream(SMALL, SMALL, reader=UNMAPPED, most_blocks=1, at_once=32),
    Stream(BIG, BIG, reader="mapped", most_blocks=16),
    Stream(LAYERED, LAYERED, reader=UNMAPPED, most_blocks=16),
    Stream(BIG, BIG, reader=UNMAPPED, most_blocks=16, grows=True),
    Stream(NHD_1, HND_1, reader="packed", most_blocks=4),
)


@dataclass(frozen=True, slots=True)
class Load:
    """All streams, their engines up; ``counts`` of how handoffs ended, and by which path."""

    pairs: Sequence[tuple[Stream, EnginePair]]
    random: Random
    counts: Counter[str]

    async def run_for(self, seconds: float) -> None:
        """Hand off at full rate, and return when all that was begun has ended."""
        deadline = time.monotonic() + seconds
        async with anyio.create_task_group() as workers:
            for stream, pair in self.pairs:
                for worker in range(stream.num_workers):
                    workers.start_soon(self._work, stream, pair, worker, deadline)
        for _, pair in self.pairs:
            await pair.source.ended()

    async def verify(self) -> None:
        """One handoff of each stream, with every byte compared."""
        for stream, pair in self.pairs:
            await pair.verify(self._tables(stream, stream.most_blocks, 0))

    async def _work(self, stream: Stream, pair: EnginePair, worker: int, deadline: float) -> None:
        first = worker * stream.at_once
        while time.monotonic() < deadline:
            tables = [
                self._tables(stream, self.random.randint(1, stream.most_blocks), first + at)
                for at in range(stream.at_once)
            ]
            if stream.grows:
                tickets = [await pair.source.compute(one, CHUNKS, CHUNK_S) for one in tables]
            else:
                tickets = await pair.source.offer(*tables)
            async with anyio.create_task_group() as fetches:
                for ticket, one in zip(tickets, tables, strict=True):
                    gives_up = not stream.grows and self.random.random() < CANCELS
                    fetches.start_soon(partial(self._fetch, pair, ticket, one, gives_up=gives_up))

    async def _fetch(
        self, pair: EnginePair, ticket: Ticket, of: PairedBlocks, *, gives_up: bool
    ) -> None:
        """One in so many is cancelled, and its offer with it."""
        block_ids = {GROUP: of.decode}
        fetch = pair.session.fetch(ticket, num_tokens=of.num_tokens, block_ids=block_ids)
        if gives_up:
            with suppress(KVBusError):  # it may have ended by now
                await fetch.cancel(release_offer=True)
        try:
            fetched = await fetch.completed()
        except FetchFailed as error:
            if not gives_up:
                error.add_note("\n".join(await _story(pair, fetch.fetch_id)))
                raise
            self.counts[error.code.value] += 1
            await fetch.blocks_freed()
        else:
            self.counts[fetched.path] += 1

    def _tables(self, stream: Stream, num_blocks: int, place: int) -> PairedBlocks:
        return scattered_tokens(
            stream.source,
            stream.target,
            num_blocks * stream.source.block_size,
            first_block=2 * stream.most_blocks * place,
            seed=self.random.getrandbits(32),
        )


async def _story(pair: EnginePair, fetch_id: str) -> list[str]:
    """What happened to a fetch, as its agent tells it."""
    endpoint = pair.session.agent.peer_endpoint
    answer = await anyio.to_thread.run_sync(ask, endpoint, "status", {"fetch_id": fetch_id})
    story: list[str] = answer["ok"]["story"]
    return story


@asynccontextmanager
async def load(bench: Bench, seed: int) -> AsyncIterator[Load]:
    """The engines of all streams; ``bench`` has a decode agent of each name."""
    async with AsyncExitStack() as stack:
        pairs = []
        for stream in STREAMS:
            source = await stack.enter_async_context(bench.source(stream.source, stream.num_blocks))
            agent = bench.agents[stream.reader]
            pair = bench.reader(stream.target, stream.num_blocks, source, agent=agent)
            pairs.append((stream, await stack.enter_async_context(pair)))
        yield Load(pairs, Random(seed), Counter())
