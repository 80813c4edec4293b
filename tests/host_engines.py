"""Engines whose cache is private memory, as a device's would be, and goes through host blocks.

They take the calls of engines whose memory is mapped, so that what is shown for one is shown for
the other.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbus.engine import AgentRole, KvCache, Later
from kvbus.engine.bounce import (
    HostBuffer,
    HostDecode,
    HostOffer,
    HostPool,
    HostPrefill,
    LocalCopier,
)
from kvbus.errors import KVBusError
from kvbus.geometry import EngineSpec
from kvbus.lab.engine import device_copy
from tests.agents import until
from tests.engines import Engine, NumBlocks
from tests.memories import Memory, rank_of
from tests.strict_links import StrictLink

PIECE_BYTES = 4096


@dataclass
class HostEngine(Engine):
    """``caches`` are the device's; ``host`` copies between them and the host blocks."""

    copies_on: ClassVar[bool] = True
    ring: HostPool
    host: HostPrefill | HostDecode

    @property
    def prefill(self) -> Any:
        """Takes the calls of a `Link` that offers."""
        assert isinstance(self.host, HostPrefill)
        return Offering(self.host, self.total)

    @property
    def decode(self) -> Any:
        """Takes the calls of a `Link` that fetches."""
        assert isinstance(self.host, HostDecode)
        return self.host


@dataclass
class Offering:
    """`Link.offer` by way of host blocks; an open offer will have ``total`` tokens."""

    host: HostPrefill
    total: int
    wait_s: float = 20.0

    async def offer(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: Mapping[str, list[int]],
        sealed: bool = True,
        first_blocks: Mapping[str, int] | None = None,
        ttl_s: float | None = None,
        transfer_id: str | None = None,
    ) -> "Offered":
        """Save before it is offered what is all, and after it what is not."""
        total = num_tokens if sealed else self.total
        offer = await self.host.begin(
            request_id, num_tokens=total, first_blocks=first_blocks, wait_s=self.wait_s
        )
        try:
            if sealed:
                await offer.save(num_tokens, block_ids)
                ticket = await offer.offer(ttl_s=ttl_s)
                await offer.seal()
            else:
                ticket = await offer.offer(ttl_s=ttl_s)
                await offer.save(num_tokens, block_ids)
        except KVBusError:
            with suppress(KVBusError):  # then it ends with the session
                await offer.abort()
            raise
        groups = self.host.link.engine.groups
        states = {group.name: block_ids.get(group.name, []) for group in groups if group.state}
        return Offered(offer, ticket, states)


@dataclass
class Offered:
    """`Offer` by way of host blocks."""

    offer: HostOffer
    ticket: dict[str, Any]
    states: dict[str, list[int]]

    @property
    def offer_id(self) -> str:
        return self.offer.offer_id

    async def extend(self, num_tokens: int, block_ids: Mapping[str, list[int]]) -> None:
        """Save what is new, and the states as they are by then."""
        self.states |= {name: block_ids[name] for name in self.states if block_ids.get(name)}
        await self.offer.save(num_tokens, {**block_ids, **self.states})

    async def seal(self) -> None:
        """All is saved."""
        await self.offer.seal()

    async def withdraw(self) -> None:
        """It was aborted."""
        await self.offer.abort()

    @property
    def ended(self) -> Later[Any]:
        """How it ended."""
        return self.offer.ended


def private_cache(spec: EngineSpec, rank: int, memory: Memory, num_blocks: NumBlocks) -> KvCache:
    """A rank's cache that nobody else can map."""
    if isinstance(num_blocks, int):
        num_blocks = {group.name: num_blocks for group in spec.groups}
    described = rank_of(spec, rank, memory, num_blocks)
    tensor = torch.zeros(described.segments[0].size_bytes, dtype=torch.uint8)
    return KvCache(spec, described, tensor)


@asynccontextmanager
async def host_engine(
    attach: Path,
    spec: EngineSpec,
    *,
    memory: Memory,
    num_blocks: NumBlocks,
    seed: int = 0,
    ring_blocks: Mapping[str, int] | None = None,
    piece_bytes: int = PIECE_BYTES,
    wait_s: float = 20.0,
    wrap_copy: Any = lambda copy: copy,
) -> AsyncIterator[HostEngine]:
    """A registered engine, all of it in this process, its cache full of random bits.

    ``ring_blocks`` are as many as the cache has when not told otherwise.
    """
    if ring_blocks is None:
        ring_blocks = {
            group.name: num_blocks if isinstance(num_blocks, int) else num_blocks[group.name]
            for group in spec.groups
        }
    buffers = [HostBuffer(spec, rank, ring_blocks) for rank in range(spec.num_ranks)]
    mapped = [KvCache(spec, buffer.rank, buffer.tensor) for buffer in buffers]
    link = StrictLink(attach, spec, memory=[one.memory for one in buffers], caches=mapped)
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(link)
        caches = [private_cache(spec, rank, memory, num_blocks) for rank in range(spec.num_ranks)]
        ring, copier = HostPool(ring_blocks), LocalCopier(buffers, wrap_copy(device_copy(caches)))
        if control.role is AgentRole.PREFILL:
            host: Any = HostPrefill(control, ring, copier, piece_bytes=piece_bytes)
        else:
            host = HostDecode(control, ring, copier, piece_bytes=piece_bytes, wait_s=wait_s)
            await stack.enter_async_context(host)
        made = HostEngine(spec, control, caches, num_blocks, ring, host)
        if seed:
            made.fill(seed)
        yield made
        await until(lambda: ring.num_held == 0)
        control.check_at_end()
