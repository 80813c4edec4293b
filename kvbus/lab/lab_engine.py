"""An engine of any shape in this process: a link with its agent, the ranks' caches, and blocks."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import anyio
import numpy as np
import numpy.typing as npt
import torch

from kvbus.engine import Completion, Fetch, KvCache, Link, Offer, Outcome, RankMemory
from kvbus.engine.bounce import (
    BlockCopy,
    CopyBlocks,
    Direction,
    HostBuffer,
    HostFetch,
    HostLink,
    HostOffer,
    HostPool,
    LocalCopier,
)
from kvbus.errors import KVBusError
from kvbus.geometry import BlockTable, EngineSpec, KvLayout, lay_out_rank
from kvbus.lab.process import TimedFetch

MAX_NOTED = 1 << 16
BlockIds = Mapping[str, npt.ArrayLike]
Tables = Mapping[str, BlockTable]
"""A table may lack blocks that left a sliding window."""


class BlockPool(HostPool):
    def __init__(self, num_blocks: Mapping[str, int], *, seed: str) -> None:
        super().__init__(num_blocks)
        self._rng = np.random.default_rng(list(seed.encode()))

    async def acquire_tables(self, wanted: Mapping[str, range], *, wait_s: float) -> Tables:
        """Return blocks for the positions in ``wanted``; raises the errors of `acquire`."""
        numbers = {group: len(blocks) for group, blocks in wanted.items()}
        acquired = await self.acquire(numbers, wait_s=wait_s)
        return {
            group: BlockTable.of(self._rng.permutation(ids), first_block=wanted[group].start)
            for group, ids in acquired.items()
        }

    def give(self, tables: Tables) -> None:
        self.release({group: table.array() for group, table in tables.items()})


class Engine:
    """All ranks of an engine and its scheduler, attached to one agent within ``async with``.

    With ``ring_blocks`` the caches are private, as on a device. The agent then maps a ring of host
    blocks, and ``copy_of`` makes the function that copies. A fetch or offer waits up to ``wait_s``
    for room in the ring.
    """

    link_type: ClassVar[type[Link]] = Link

    def __init__(
        self,
        attach_path: str | Path,
        spec: EngineSpec,
        layout: KvLayout,
        *,
        num_blocks: Mapping[str, int],
        ring_blocks: Mapping[str, int] | None = None,
        copy_of: "Callable[[Sequence[KvCache]], CopyBlocks] | None" = None,
        device: str = "cpu",
        ranks: Iterable[int] | None = None,
        wait_s: float = 30.0,
        **options: Any,
    ) -> None:
        self.spec, self.layout, self.num_blocks = spec, layout, num_blocks
        self.device, self._wait_s = torch.device(device), wait_s
        self.blocks = BlockPool(num_blocks, seed=spec.engine_id)
        self.ring: HostPool | None = None
        ranks = range(spec.num_ranks) if ranks is None else ranks
        if ring_blocks is None:
            pairs = [self.shared_cache(rank) for rank in ranks]
            memory = [rank_memory for rank_memory, _ in pairs]
            self.caches = self.mapped = [cache for _, cache in pairs]
        else:
            self.ring = HostPool(ring_blocks)
            buffers = [HostBuffer(spec, rank, ring_blocks) for rank in ranks]
            memory = [one.memory for one in buffers]
            self.caches = [self.private_cache(one.rank.rank) for one in memory]
            self.mapped = [KvCache(spec, one.rank, one.tensor) for one in memory]
            self._copier = LocalCopier(buffers, (copy_of or device_copy)(self.caches))
        self.link = self.link_type(attach_path, spec, memory=memory, **options)
        self.host: HostLink | None = None
        self._offers: dict[Offered, None] = {}
        self._released = deque[tuple[float, float]](maxlen=MAX_NOTED)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.link)
        if self.ring is not None:
            self.host = HostLink(self.link, self.ring, self._copier)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def shared_cache(self, rank: int) -> tuple[RankMemory, KvCache]:
        made = RankMemory.allocate(
            self.spec, rank, self.layout, num_blocks=self.num_blocks, device=self.device
        )
        return made, KvCache(self.spec, made.rank, made.tensor)

    def private_cache(self, rank: int) -> KvCache:
        return private_cache(self.spec, rank, self.layout, self.num_blocks, self.device)

    @property
    def num_held(self) -> int:
        return self.blocks.num_held + (self.ring.num_held if self.ring is not None else 0)

    async def offer(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: BlockIds,
        total: int | None = None,
        first_blocks: Mapping[str, int] | None = None,
        ttl_s: float | None = None,
        **options: Any,
    ) -> "Offered":
        """Offer the computed tokens; with ``total``, the caller adds the rest later and seals.

        A ring ignores ``options``.
        """
        ready_s = time.monotonic()
        if self.host is None:
            shared = await self.link.offer(
                request_id,
                num_tokens=num_tokens,
                block_ids=block_ids,
                sealed=total is None,
                first_blocks=first_blocks,
                ttl_s=ttl_s,
                **options,
            )
            offered = Offered(shared, ready_s)
        else:
            made = await self.host.offer(
                request_id,
                num_tokens=num_tokens if total is None else total,
                first_blocks=first_blocks,
                wait_s=self._wait_s,
                ttl_s=ttl_s,
                **options,
            )
            offered = Offered(made, ready_s)
            offered.states = {
                group.name: block_ids.get(group.name, ())
                for group in self.spec.groups
                if group.state
            }
            if total is None:
                offered.saved = asyncio.create_task(_save(made, num_tokens, block_ids))
            elif num_tokens:
                try:
                    await offered.extend(num_tokens, block_ids)
                except KVBusError:
                    await offered.withdraw()
                    raise
        self._offers[offered] = None
        offered.offer.ended.add_callback(partial(self._on_ended, offered))
        return offered

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        **options: Any,
    ) -> "RunningFetch":
        began_s = time.monotonic()
        options |= {"num_tokens": num_tokens, "block_ids": block_ids}
        if self.host is None:
            return RunningFetch(self.link.fetch(ticket, **options), began_s)
        fetch = self.host.fetch(ticket, wait_s=self._wait_s, **options)
        return RunningFetch(fetch, began_s)

    async def settle(self, stall_s: float = 20.0) -> list[tuple[float, float]]:
        """Wait until no offer is live and no block is held, or nothing changes for ``stall_s``.

        Return `time.monotonic` times of ended offers: last tokens ready, blocks released.
        """
        num_before, num_left = -1, self._num_left
        while num_left and num_left != num_before:
            with anyio.move_on_after(stall_s):
                for offered in list(self._offers):
                    with suppress(KVBusError):
                        await offered.offer.ended
                for pool in (self.blocks, self.ring):
                    if pool is not None:
                        await pool.all_free()
            num_before, num_left = num_left, self._num_left
        released = list(self._released)
        self._released.clear()
        return released

    @property
    def offers(self) -> list["Offered"]:
        """Live offers."""
        return list(self._offers)

    @property
    def _num_left(self) -> int:
        return self.num_held + len(self._offers)

    def _on_ended(self, offered: "Offered") -> None:
        del self._offers[offered]
        self._released.append((offered.ready_s, time.monotonic()))


class Offered:
    def __init__(self, offer: Offer | HostOffer, ready_s: float) -> None:
        self.offer, self.ticket, self.ready_s = offer, offer.ticket, ready_s
        self.states: dict[str, npt.ArrayLike] = {}
        """Blocks of the state groups; the ring needs them again."""
        self.saved: asyncio.Task[None] | None = None

    @property
    def offer_id(self) -> str:
        return self.offer.offer_id

    @property
    def ended(self) -> Completion[Outcome]:
        return self.offer.ended

    async def extend(self, num_tokens: int, block_ids: BlockIds, *, after: int = 0) -> None:
        """The copy of a ring waits for the device itself, not for ``after``."""
        self.ready_s = time.monotonic()
        if isinstance(self.offer, HostOffer):
            given = {name: ids for name, ids in block_ids.items() if np.size(ids)}
            self.states |= {name: given[name] for name in self.states.keys() & given.keys()}
            await self.offer.save(num_tokens, {**block_ids, **self.states})
        else:
            await self.offer.extend(num_tokens, block_ids, after=after)

    async def seal(self) -> None:
        await self.offer.seal()

    async def freed(self) -> None:
        """Return when the engine owns the blocks again: released, or copied into the ring."""
        if self.saved is not None:
            await self.saved
        elif not isinstance(self.offer, HostOffer):
            await self.offer.ended

    async def withdraw(self) -> None:
        with suppress(KVBusError):  # it has already ended, or the agent has
            await self.offer.withdraw()
            await self.offer.ended


async def _save(offer: HostOffer, num_tokens: int, block_ids: BlockIds) -> None:
    await offer.save(num_tokens, block_ids)
    await offer.seal()


class RunningFetch:
    """It records its end before any waiting task continues."""

    def __init__(self, fetch: Fetch | HostFetch, began_s: float) -> None:
        self.fetch, self._began_s, self._ended_s = fetch, began_s, began_s
        fetch.ended.add_callback(self._on_ended)

    async def timed(self) -> TimedFetch:
        fetched = await self.fetch.ended
        return TimedFetch(fetched, self._ended_s - self._began_s, self._ended_s)

    def _on_ended(self) -> None:
        self._ended_s = time.monotonic()


def private_cache(
    spec: EngineSpec,
    rank: int,
    layout: KvLayout,
    num_blocks: int | Mapping[str, int],
    device: torch.device,
) -> KvCache:
    described = lay_out_rank(spec, rank, layout, num_blocks=num_blocks)
    size_bytes = described.segments[0].size_bytes
    return KvCache(spec, described, torch.zeros(size_bytes, dtype=torch.uint8, device=device))


def device_copy(caches: Sequence[KvCache]) -> CopyBlocks:
    def copy(blocks: BlockCopy, ring: torch.Tensor, direction: Direction) -> None:
        ids, (start, stop) = torch.from_numpy(blocks.ids.astype(np.int64)), blocks.slots
        for number, layer in enumerate(blocks.layers):
            for at, part in enumerate(blocks.parts):
                device = caches[blocks.rank].view(layer, part)[:, start:stop]
                if direction is Direction.SAVE:
                    ring[:, number, at] = device[ids]
                else:
                    device[ids] = ring[:, number, at].to(device.device)
        if device.is_cuda:
            torch.cuda.synchronize(device.device)

    return copy
