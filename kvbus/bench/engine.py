"""Engines of the benchmark: caches of a shape, full of a pattern, on an engine of `kvbus.lab`.

The planner is not trusted: what is compared are views and block ids alone.

    python -m kvbus.bench.engine ATTACH_SOCKET    prefill engines, which do what the line asks for

Axes
    block, slot, head   of the rank's cache; heads have their numbers in the model
    word                8 bytes of a head, or of a block
"""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch
from torch import Tensor

from kvbus.bench.shapes import GROUP, PairedBlocks, Shape
from kvbus.engine import AgentRole, KvCache
from kvbus.engine.bounce import CopyBlocks, Direction, HostBlocks
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import KvPart
from kvbus.lab.engine import Engine
from kvbus.lab.process import Question, Taken, run_program, serve
from kvbus.memory.segment import huge_bytes

Ticket = Mapping[str, Any]
Request = tuple[str, int, list[int]]
"""A request id that was never used, its number of tokens, and its blocks."""

_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


class BenchEngine(Engine):
    """An engine with ``num_blocks`` blocks; that of a prefill agent is full of the pattern.

    A ring has half the blocks: the requests of the benchmark use every other one.
    """

    def __init__(
        self,
        attach_path: str | Path,
        engine_id: str,
        shape: Shape,
        num_blocks: int,
        *,
        role: AgentRole,
        attach_timeout_s: float = 30.0,
    ) -> None:
        self.shape, self._role = shape, role
        super().__init__(
            attach_path,
            shape.engine(engine_id),
            shape.parse(),
            num_blocks={GROUP: num_blocks},
            ring_blocks={GROUP: max(1, num_blocks // 2)} if shape.host else None,
            copy_of=cache_copy,
            role=role,
            attach_timeout_s=attach_timeout_s,
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._role is AgentRole.PREFILL:
            self._fill()
        return self

    async def take(self, ticket: Ticket, tables: PairedBlocks) -> Taken:
        """Fetch an offer, and time it; raises `FetchFailed`."""
        block_ids = {GROUP: tables.decode}
        taking = self.fetch(ticket, num_tokens=tables.num_tokens, block_ids=block_ids)
        try:
            return await taking.taken()
        except FetchFailed:
            with suppress(KVBusError):  # then the offer ends by its time to live
                await taking.fetch.cancel(release_offer=True)
            raise

    async def offer_all(self, requests: Sequence[Request]) -> list[Ticket]:
        """Several offers at once, as after one step of an engine."""
        offered = await asyncio.gather(
            *(
                self.offer(request_id, num_tokens=num_tokens, block_ids={GROUP: blocks})
                for request_id, num_tokens, blocks in requests
            )
        )
        return [one.ticket for one in offered]

    def _fill(self) -> None:
        """Write the pattern to all ranks."""
        for number, heads, words in self._parts():
            blocks, slots = (torch.arange(size) for size in words.shape[:2])
            words.copy_(_pattern(number, blocks[:, None], slots, heads=heads, num=words.shape[3]))

    def wipe(self) -> None:
        """Zero the caches, so that old bytes cannot pass for new ones."""
        for _, _, words in self._parts():
            words.zero_()

    def has(self, tables: PairedBlocks, source: Shape) -> bool:
        """Whether the tokens of ``tables`` are those of a prefill engine of shape ``source``."""
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
        """The part of its memory that lies in huge pages."""
        storages = [cache.view(0, KvPart.KEY).untyped_storage() for cache in self.caches]
        in_huge_pages = sum(huge_bytes(one.data_ptr()) for one in storages)
        return in_huge_pages / sum(one.nbytes() for one in storages)

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """A number, the heads and the words [block, slot, head, word] of each part of a layer."""
        for cache in self.caches:
            for region in cache.rank.regions:
                heads = torch.arange(region.first_head, region.first_head + region.num_heads)
                for layer, (at, part) in product(region.layers, enumerate(region.parts)):
                    yield layer << 1 | at, heads, cache.view(layer, part).view(torch.int64)


def _pattern(number: int, blocks: Tensor, slots: Tensor, *, heads: Tensor, num: int) -> Tensor:
    """[..., head, word]: what belongs into these slots, no two words of a model alike."""
    rows = ((number << 24 | blocks) << 8 | slots)[..., None, None]
    numbers = rows << 16 | heads[:, None] << 8 | torch.arange(num)
    return numbers.add_(1).mul_(_FACTOR)


def cache_copy(caches: Sequence[KvCache]) -> CopyBlocks:
    """Copies whole blocks of one rank's cache, each of which is one piece of memory."""
    (cache,) = caches
    torch.set_num_threads(1)  # else each block's copy waits for another thread to be woken
    part = cache.view(0, KvPart.KEY)
    words = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).view(torch.int64)
    device = words.view(part.shape[0], -1)

    def copy(blocks: HostBlocks, ring: Tensor, direction: Direction) -> None:
        slots = ring.reshape(len(ring), -1).view(torch.int64)
        ids = torch.from_numpy(blocks.ids.astype(np.int64))
        if direction is Direction.SAVE:
            torch.index_select(device, 0, ids, out=slots)
        else:
            torch._foreach_copy_([device[block_id] for block_id in ids.tolist()], list(slots))

    return copy


async def prefill_engines(attach_path: str) -> None:
    """Be all that is opened, and do what each is asked for."""
    engines: dict[str, BenchEngine] = {}

    async def answer(question: Question) -> object:
        name, given = question.engine, question.given
        if question.do == "open":
            shape = msgspec.convert(given["shape"], Shape)
            engine = BenchEngine(
                attach_path, name, shape, given["num_blocks"], role=AgentRole.PREFILL
            )
            engines[name] = await engine.__aenter__()
            return None
        if question.do == "close":
            await engines.pop(name).__aexit__()
            return None
        return await getattr(engines[name], question.do)(**given)

    await serve(answer)
    for engine in engines.values():
        await engine.__aexit__()


if __name__ == "__main__":
    run_program(partial(prefill_engines, sys.argv[1]))
