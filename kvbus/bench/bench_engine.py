"""Engines of the benchmark: ``python -m kvbus.bench.bench_engine ATTACH_SOCKET``.

Their caches are full of a pattern. The comparison uses views and block ids, not the planner. A word
is 8 bytes of a head, or of a block; heads have their numbers in the model.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvbus.engine import AgentRole, KvCache, Offer, Outcome, RankMemory
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import BlockTable, KvPart, lay_out_rank, num_blocks_for
from kvbus.lab.lab_engine import Engine
from kvbus.lab.process import TimedFetch, run_program, serve
from kvbus.memory.cuda import GpuAllocation, GpuMemory, read_bytes, write_bytes
from kvbus.memory.segment import huge_bytes
from kvbus.planning import PlacedRank, ReadMap, Reads, RunPlan
from kvbus.spec_text import ModelFields, read_fields

Blocks = npt.NDArray[np.int64]
Ticket = Mapping[str, Any]
Request = tuple[str, int, list[int]]
"""Unused request id, number of tokens, and blocks."""

GROUP = "attention"
NUM_PARTS, DTYPE_BYTES = 2, 2
CHUNK_BYTES = 64 << 20


class Shape(ModelFields, kw_only=True):
    @property
    def token_bytes(self) -> int:
        return self.layers * NUM_PARTS * self.kv_heads * self.head * DTYPE_BYTES

    @property
    def block_bytes(self) -> int:
        return self.block * self.token_bytes


def _shape(text: str) -> Shape:
    return read_fields("shape", f"{text} head=128", Shape)


BIG = _shape("layers=4 kv_heads=8 cross_layer=true")
"""256 KiB a block, in one run."""

LAYERED = _shape("layers=16 kv_heads=2")
"""256 KiB a block, in 16 runs."""

SMALL = _shape("layers=4 kv_heads=2 cross_layer=true")
"""64 KiB a block, in one run."""

NHD_1 = _shape("layers=16 kv_heads=8")
NHD_2 = _shape("layers=16 kv_heads=8 tp=2")
HND_1 = _shape("layers=16 kv_heads=8 layout=HND")


@dataclass(frozen=True, slots=True)
class PairedBlocks:
    prefill: Blocks
    decode: Blocks
    num_tokens: int

    @property
    def capacities(self) -> tuple[int, int]:
        """Twice the blocks of the request, so that none need be adjacent."""
        return 2 * len(self.prefill), 2 * len(self.decode)


def contiguous(num_blocks: int, shape: Shape = BIG, *, first_block: int = 0) -> PairedBlocks:
    """Return blocks in order: all runs merge."""
    blocks = first_block + np.arange(num_blocks)
    return PairedBlocks(blocks, blocks, num_blocks * shape.block)


def scattered(
    num_blocks: int, shape: Shape = BIG, *, first_block: int = 0, seed: int = 0
) -> PairedBlocks:
    """Return every other block of a range, shuffled: no runs merge."""
    num_tokens = num_blocks * shape.block
    return scattered_tokens(shape, shape, num_tokens, first_block=first_block, seed=seed)


def scattered_tokens(
    source: Shape, target: Shape, num_tokens: int, *, first_block: int = 0, seed: int = 0
) -> PairedBlocks:
    rng = np.random.default_rng(seed)
    prefill, decode = (
        rng.permutation(first_block + 2 * np.arange(num_blocks_for(num_tokens, shape.block)))
        for shape in (source, target)
    )
    return PairedBlocks(prefill, decode, num_tokens)


def direct_descriptors(source: Shape, target: Shape, tables: PairedBlocks) -> tuple[Reads, int]:
    """Return the direct path's reads, by offsets, and the larger memory's bytes."""
    num_source, num_target = tables.capacities
    prefill, prefill_bytes = _placed_ranks(source, num_source)
    decode, decode_bytes = _placed_ranks(target, num_target)
    ranks = [[placed.rank for placed in side.values()] for side in (prefill, decode)]
    runs = RunPlan(prefill, decode, ReadMap(*ranks).shares()).runs(
        {GROUP: BlockTable.of(tables.prefill)},
        {GROUP: BlockTable.of(tables.decode)},
        {GROUP: (0, tables.num_tokens)},
    )
    return runs.reads(), max(prefill_bytes, decode_bytes)


def _placed_ranks(shape: Shape, num_blocks: int) -> tuple[dict[int, PlacedRank], int]:
    spec, placed, end = shape.engine("any"), {}, 0
    for number in range(shape.tp):
        rank = lay_out_rank(spec, number, shape.parse(), num_blocks=num_blocks)
        placed[number] = PlacedRank(spec, rank, {rank.segments[0].segment_id: end})
        end += rank.segments[0].size_bytes
    return placed, end


_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class BenchEngine(Engine):
    def __init__(
        self,
        attach_path: str | Path,
        engine_id: str,
        shape: Shape,
        num_blocks: int,
        *,
        role: AgentRole,
        device: str = "cpu",
        attach_timeout_s: float = 30.0,
    ) -> None:
        self.shape, self._role = shape, role
        self._mirrors = list[tuple[GpuMemory, Tensor]]()
        super().__init__(
            attach_path,
            shape.engine(engine_id),
            shape.parse(),
            num_blocks={GROUP: num_blocks},
            role=role,
            device=device,
            attach_timeout_s=attach_timeout_s,
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._role is AgentRole.PREFILL:
            self._fill()
        return self

    def shared_cache(self, rank: int) -> tuple[RankMemory, KvCache]:
        """Give GPU memory a mirror on the host, so that torch needs no CUDA."""
        made = RankMemory.allocate(
            self.spec, rank, self.layout, num_blocks=self.num_blocks, device=self.device
        )
        (storage,) = made.storages.values()
        if not isinstance(storage, GpuAllocation):
            return made, KvCache(self.spec, made.rank, made.tensor)
        mirror = torch.zeros(storage.size_bytes, dtype=torch.uint8)
        self._mirrors.append((storage.memory, mirror))
        return made, KvCache(self.spec, made.rank, mirror)

    async def fetch_timed(self, ticket: Ticket, tables: PairedBlocks) -> TimedFetch:
        block_ids = {GROUP: tables.decode}
        running = self.fetch(ticket, num_tokens=tables.num_tokens, block_ids=block_ids)
        try:
            return await running.timed()
        except FetchFailed:
            with suppress(KVBusError):  # then the offer expires
                await running.fetch.cancel(release_offer=True)
            raise

    async def offer_all(self, requests: Sequence[Request]) -> list[Ticket]:
        offered = await asyncio.gather(
            *(
                self.offer(request_id, num_tokens=num_tokens, block_ids={GROUP: blocks})
                for request_id, num_tokens, blocks in requests
            )
        )
        return [one.ticket for one in offered]

    async def park(self) -> float:
        (offered,) = self.offers
        began_s = time.perf_counter()
        if not isinstance(offered.offer, Offer):
            raise KVBusError("offers of host blocks are not parked")
        await offered.offer.park()
        if (outcome := await offered.ended) is not Outcome.PARKED:
            raise KVBusError(f"an offer was {outcome}, not parked")
        return time.perf_counter() - began_s

    def _fill(self) -> None:
        for number, heads, words in self._parts():
            blocks, slots = (torch.arange(size) for size in words.shape[:2])
            words.copy_(_pattern(number, blocks[:, None], slots, heads=heads, num=words.shape[3]))
        self._write_mirrors()

    def wipe(self) -> None:
        for _, _, words in self._parts():
            words.zero_()
        self._write_mirrors()

    def has(self, tables: PairedBlocks, source: Shape) -> bool:
        for memory, mirror in self._mirrors:
            for at, part in _chunks(mirror):
                content = read_bytes(memory.ordinal, memory.address + at, len(part))
                part[:] = np.frombuffer(content, np.uint8)
        positions = torch.arange(tables.num_tokens)
        prefill, decode = torch.from_numpy(tables.prefill), torch.from_numpy(tables.decode)
        blocks, slots = prefill[positions // source.block], positions % source.block
        return all(
            torch.equal(
                words[decode[positions // words.shape[1]], positions % words.shape[1]],
                _pattern(number, blocks, slots, heads=heads, num=words.shape[3]),
            )
            for number, heads, words in self._parts()
        )

    def huge_share(self) -> float:
        storages = [cache.view(0, KvPart.KEY).untyped_storage() for cache in self.caches]
        in_huge_pages = sum(huge_bytes(one.data_ptr()) for one in storages)
        return in_huge_pages / sum(one.nbytes() for one in storages)

    def _write_mirrors(self) -> None:
        for memory, mirror in self._mirrors:
            for at, part in _chunks(mirror):
                write_bytes(memory.ordinal, memory.address + at, part.tobytes())

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield number, heads and words [block, slot, head, word] of each part."""
        for cache in self.caches:
            for region in cache.rank.regions:
                heads = torch.arange(region.first_head, region.first_head + region.num_heads)
                for layer, (at, part) in product(region.layers, enumerate(region.parts)):
                    yield layer << 1 | at, heads, cache.view(layer, part).view(torch.int64)


def _chunks(mirror: Tensor) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    for at in range(0, len(mirror), CHUNK_BYTES):
        yield at, mirror[at : at + CHUNK_BYTES].numpy()


def _pattern(number: int, blocks: Tensor, slots: Tensor, *, heads: Tensor, num: int) -> Tensor:
    """Return [..., head, word]. All words of a model differ."""
    rows = ((number << 24 | blocks) << 8 | slots)[..., None, None]
    numbers = rows << 16 | heads[:, None] << 8 | torch.arange(num)
    return numbers.add_(1).mul_(_FACTOR)


class Engines:
    def __init__(self, attach_path: str) -> None:
        self._attach_path = attach_path
        self._engines: dict[str, BenchEngine] = {}

    async def open(self, name: str, shape: dict[str, Any], num_blocks: int, device: str) -> None:
        engine = BenchEngine(
            self._attach_path,
            name,
            msgspec.convert(shape, Shape),
            num_blocks,
            role=AgentRole.PREFILL,
            device=device,
        )
        self._engines[name] = await engine.__aenter__()

    async def close(self, name: str) -> None:
        await self._engines.pop(name).__aexit__()

    async def offer(self, name: str, requests: list[Request]) -> list[Ticket]:
        return await self._engines[name].offer_all(requests)

    async def park(self, name: str) -> float:
        """Park the engine's only offer; return the seconds until its blocks are free."""
        return await self._engines[name].park()

    async def settle(self, name: str) -> list[tuple[float, float]]:
        return await self._engines[name].settle()

    async def be(self) -> None:
        await serve(self)
        for name in list(self._engines):
            await self.close(name)


if __name__ == "__main__":
    run_program(Engines(sys.argv[1]).be)
