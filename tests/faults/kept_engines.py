"""Engines that outlive their agents, and handoffs between them that go on whatever happens."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import anyio
import torch

from kvbus.engine import DecodeSession, Fetch, KeptSession, KvCache, MemorySession, PrefillSession
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import KvPart
from tests.engines import FULL, make_spec
from tests.memories import NHD
from tests.strict_sessions import bits

BLOCKS_EACH = 4
NUM_TOKENS = BLOCKS_EACH * FULL.block_size

S = TypeVar("S", PrefillSession, DecodeSession)


@dataclass
class KeptEngine(Generic[S]):
    """One engine, whose cache stays while its sessions come and go."""

    control: KeptSession[S]
    memory: KeptSession[MemorySession]
    cache: KvCache

    def write(self, block_ids: list[int], values: torch.Tensor) -> None:
        """Fill the blocks of every layer and part."""
        for view in views_of(self.cache):
            view[block_ids] = values

    def holds(self, block_ids: list[int], values: torch.Tensor) -> bool:
        """Whether the blocks of every layer and part are full of ``values``."""
        return all(bool((view[block_ids] == values).all()) for view in views_of(self.cache))


def views_of(cache: KvCache) -> list[torch.Tensor]:
    """Every layer and part of a cache, as bits."""
    parts = (KvPart.KEY, KvPart.VALUE)
    return [bits(cache.view(layer, part)) for layer in FULL.layers for part in parts]


@asynccontextmanager
async def kept_engine(
    kind: type[S], attach: Path, *, num_blocks: int
) -> AsyncIterator[KeptEngine[S]]:
    """An engine with a kept session of each kind."""
    spec = make_spec()
    async with AsyncExitStack() as stack:
        storages = stack.enter_context(ExitStack())
        open_memory = partial(MemorySession, attach, spec, 0, storages=storages)
        memory = await stack.enter_async_context(KeptSession(open_memory, name="memory"))
        cache = await (await memory.opened()).allocate(NHD, num_blocks=num_blocks)

        async def begin(session: S) -> None:
            await session.register()
            await session.ready()

        control = KeptSession[S](partial(kind, attach, spec), begin=begin, name="control")
        await stack.enter_async_context(control)
        await control.opened()
        yield KeptEngine(control, memory, cache)


@dataclass
class Handoffs:
    """Handoffs one after the other, between the same blocks, until `is_over`.

    The blocks of the source are overwritten in the callback of their release; those of the target
    must not change once they are free.
    """

    source: KeptEngine[PrefillSession]
    target: KeptEngine[DecodeSession]
    number: int
    pause_s: float = 0.0
    is_over: bool = False
    num_completed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """How often each offer and fetch has ended, by its id."""
    trouble: list[str] = field(default_factory=list)

    async def run(self) -> None:
        first = self.number * BLOCKS_EACH
        theirs = list(range(first, first + BLOCKS_EACH))
        for turn in range(1 << 30):
            if self.is_over:
                return
            sent = torch.arange(NUM_TOKENS).reshape(BLOCKS_EACH, -1, 1, 1)
            sent = (sent * 7 + turn * 101 + self.number * 3001).to(torch.int16)
            try:
                await self._hand_over(f"{self.number}-{turn}", theirs, theirs[::-1], sent)
            except KVBusError as error:
                self.failures[f"{error.code}: {error.message}"] += 1
                await self.source.control.opened()
                await self.target.control.opened()
            await anyio.sleep(self.pause_s)

    async def _hand_over(
        self, request_id: str, theirs: list[int], ours: list[int], sent: torch.Tensor
    ) -> None:
        self.source.write(theirs, sent)
        offer = await self.source.control.latest.offer(
            request_id, num_tokens=NUM_TOKENS, block_ids={FULL.name: theirs}
        )
        offer.when_released(lambda: self.ends.update([offer.offer_id]))
        offer.when_released(lambda: self.source.write(theirs, torch.tensor(-1, dtype=torch.int16)))
        try:
            fetch = self.target.control.latest.fetch(
                offer.ticket, num_tokens=NUM_TOKENS, block_ids={FULL.name: ours}
            )
            fetch.when_ended(lambda: self.ends.update([fetch.fetch_id]))
            await self._take(fetch, ours, sent)
        except KVBusError:
            await offer.withdraw()
            raise
        await offer.released()

    async def _take(self, fetch: Fetch, ours: list[int], sent: torch.Tensor) -> None:
        canary = torch.tensor(-2, dtype=torch.int16)
        try:
            await fetch.completed()
        except FetchFailed:
            await fetch.blocks_freed()
            self.target.write(ours, canary)
            await anyio.sleep(0.05)  # time for what must not come
            if not self.target.holds(ours, canary):
                self.trouble.append(f"{fetch.fetch_id}: bytes landed in free blocks")
            raise
        self.num_completed += 1
        if not self.target.holds(ours, sent):
            self.trouble.append(f"{fetch.fetch_id}: completed with wrong bytes")
