"""Engines of the demo, one process each: ``python -m kvbus.demo.demo_engine SETUP``."""

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec
import torch
from anyio import CapacityLimiter
from anyio.abc import TaskGroup
from torch import Tensor

from kvbus.demo.model import Generation, PagedKV, Transformer, first_seen, greedy, slots
from kvbus.demo.options import EngineSetup, Step, encode
from kvbus.errors import FetchFailed, KVBusError
from kvbus.geometry import num_blocks_for
from kvbus.lab.lab_engine import Engine, Offered, RunningFetch, Tables
from kvbus.lab.process import TimedFetch, run_program, serve

PATIENCE_S = 600.0  # the driver times out earlier

T = TypeVar("T")


class Pass(NamedTuple):
    """``after`` is reached when the GPU has computed it."""

    num_tokens: int
    block_ids: dict[str, list[int]]
    logits: Tensor
    after: int


class DemoEngine:
    """Requests take turns on one device."""

    def __init__(self, setup: EngineSetup, engine: Engine, tasks: TaskGroup) -> None:
        self._setup, self._engine, self._tasks = setup, engine, tasks
        self._model = Transformer(setup.spec, device=setup.device)
        self._kv = PagedKV.of(engine.caches)
        self._device = CapacityLimiter(1)
        self._block_size = setup.spec.groups[0].block_size
        self._prefills: dict[str, tuple[Offered, Tables, AsyncIterator[Pass], Pass | None]] = {}
        self._fetched: dict[str, tuple[Generation, int]] = {}
        self._flips_left = int(setup.flip_one_byte)

    async def settle(self) -> int:
        await self._engine.settle()
        return self._engine.num_held

    async def prefill(self, request_id: str, prompt: str) -> Mapping[str, Any]:
        """Offer the KV of a prompt, after its computation or, in chunks, before."""
        tokens = encode(prompt)
        wanted = range(num_blocks_for(len(tokens), self._block_size))
        tables = await self._take(dict.fromkeys(self._engine.blocks.num_blocks, wanted))
        passes = self._passes(tokens, tables)
        whole = None if self._setup.prefill_chunk else await anext(passes)
        try:
            offered = await self._engine.offer(
                request_id,
                num_tokens=whole.num_tokens if whole else 0,
                block_ids=whole.block_ids if whole else dict.fromkeys(tables, ()),
                total=None if whole else len(tokens),
                after=whole.after if whole else 0,
            )
        except KVBusError:
            self._engine.blocks.give(tables)
            raise
        self._prefills[request_id] = offered, tables, passes, whole
        return offered.ticket

    async def compute(self, request_id: str) -> Step:
        offered, tables, passes, whole = self._prefills.pop(request_id)
        try:
            last = whole or await _extend(offered, passes)
        except KVBusError:
            await offered.withdraw()
            self._engine.blocks.give(tables)
            raise
        self._tasks.start_soon(self._give_when_free, offered, tables)
        return await self._on_device(partial(greedy, last.logits))

    async def _give_when_free(self, offered: Offered, tables: Tables) -> None:
        with contextlib.suppress(KVBusError):  # the agent and its readers are gone
            await offered.freed()
            self._engine.blocks.give(tables)

    async def fetch(
        self, request_id: str, ticket: dict[str, Any], num_tokens: int, num_new: int
    ) -> TimedFetch:
        """Positions before a sliding window get no blocks."""
        size, wanted = self._block_size, {}
        for group in self._setup.spec.groups:
            first, _ = group.positions(0, num_tokens)
            wanted[group.name] = range(first // size, num_blocks_for(num_tokens + num_new, size))
        num_blocks = num_blocks_for(num_tokens, size)  # the rest is for new tokens
        tables: Tables = {}
        try:
            tables = await self._take(wanted)
            block_ids = {
                group: table.array()[: num_blocks - table.first_block]
                for group, table in tables.items()
            }
            running = self._engine.fetch(
                ticket,
                num_tokens=num_tokens,
                block_ids=block_ids,
                after=self._engine.link.record(),  # earlier work on these blocks
            )
        except KVBusError:  # the prompt is longer than this engine has room for
            self._engine.blocks.give(tables)
            self._engine.link.release(ticket)
            raise
        try:
            timed = await running.timed()
        except FetchFailed:
            self._tasks.start_soon(self._give_up, running, tables)
            raise
        self._fetched[request_id] = Generation(self._model, self._kv, tables), num_tokens
        return timed

    async def generate(self, request_id: str, token: int, num_new: int) -> list[Step]:
        generation, num_tokens = self._fetched.pop(request_id)
        steps = list[Step]()
        if self._flips_left:
            self._flips_left -= 1
            rng = Random(num_tokens)  # noqa: S311 - any place will do
            flip_one_byte(generation, num_tokens, rng)
        for position in range(num_tokens, num_tokens + num_new):
            steps += await self._on_device(partial(generation.decode, token, position))
            token = steps[-1].token
        self._engine.blocks.give(generation.tables)
        return steps

    async def _give_up(self, running: RunningFetch, tables: Tables) -> None:
        with contextlib.suppress(KVBusError):  # then the offer expires
            await running.fetch.cancel(release_offer=True)
        await running.fetch.freed
        self._engine.blocks.give(tables)

    async def _passes(self, prompt: list[int], tables: Tables) -> AsyncIterator[Pass]:
        size, num_before, chunk = self._block_size, 0, self._setup.prefill_chunk
        passes = Generation(self._model, self._kv, tables).prefill(prompt, chunk)

        def launch() -> tuple[int, Tensor, int] | None:
            launched = next(passes, None)
            return launched and (*launched, self._engine.link.record())

        while (launched := await self._on_device(launch)) is not None:
            num_tokens, logits, after = launched
            new = slice(num_blocks_for(num_before, size), num_blocks_for(num_tokens, size))
            ids = {name: table.array()[new].tolist() for name, table in tables.items()}
            yield Pass(num_tokens, ids, logits, after)
            num_before = num_tokens

    async def _on_device(self, step: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(step, limiter=self._device)

    async def _take(self, wanted: Mapping[str, range]) -> Tables:
        return await self._engine.blocks.acquire_tables(wanted, wait_s=PATIENCE_S)


async def _extend(offered: Offered, passes: AsyncIterator[Pass]) -> Pass:
    async for one in passes:
        await offered.extend(one.num_tokens, one.block_ids, after=one.after)
    await offered.seal()
    return one


def flip_one_byte(generation: Generation, num_tokens: int, rng: Random) -> None:
    layer, group = rng.choice(sorted(generation.model.groups.items()))
    view = rng.choice(generation.kv.ranks_of(layer))[group.parts[0]]
    position = rng.randrange(first_seen(num_tokens, group.window), num_tokens)
    block, slot = slots(generation.tables[group.name], view, position, position + 1)
    row = view[int(block), int(slot), rng.randrange(view.shape[2])].view(torch.uint8)
    row[rng.randrange(len(row))] ^= 0xFF


async def main(setup: EngineSetup) -> None:
    engine = Engine(
        setup.attach_path,
        setup.spec,
        setup.layout,
        num_blocks=setup.num_blocks,
        ring_blocks=setup.ring_blocks,
        device=setup.device,
        attach_timeout_s=PATIENCE_S,
        wait_s=PATIENCE_S,
    )
    async with engine, anyio.create_task_group() as tasks:
        await serve(DemoEngine(setup, engine, tasks))
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    run_program(partial(main, msgspec.json.decode(sys.argv[1], type=EngineSetup)))
