"""The demo's prefill engine, a process: computes prompts and offers their KV.

Blocks are used for another request only when no one may read them any more.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvbus.demo.engine import DemoEngine, run_engine
from kvbus.demo.messages import Failed, Offered, Prefill, Prefilled, Step
from kvbus.demo.model import Generation
from kvbus.demo.prompts import encode
from kvbus.errors import KVBusError
from kvbus.geometry import num_blocks_for
from kvbus.lab.engine import Tables


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """One pass: tokens so far, its new blocks by group, the token that follows, and when."""

    num_tokens: int
    block_ids: dict[str, list[int]]
    step: Step
    at_s: float


class PrefillRequests:
    """The requests of one prefill engine."""

    def __init__(self, engine: DemoEngine) -> None:
        self._engine, self._chunk = engine, engine.setup.prefill_chunk

    async def handle(self, work: Prefill) -> None:
        """One request, from its prompt to the moment when its blocks may be used again."""
        engine, num_tokens = self._engine, len(encode(work.prompt))
        tables = await engine.take(
            lambda group: range(num_blocks_for(num_tokens, group.block_size))
        )
        try:
            await self._offer(work, tables)
        except KVBusError as error:
            await engine.line.send(Failed(work.request_id, error.code, error.message))
        engine.engine.blocks.give(tables)

    async def _offer(self, work: Prefill, tables: Tables) -> None:
        """A whole prompt is computed before it is offered. Chunks are offered first, so that what
        is there is read while this computes.
        """
        engine, prompt = self._engine, encode(work.prompt)
        passes = self._compute(prompt, tables)
        if self._chunk is None:
            last = await anext(passes)
            offer = await engine.engine.offer(
                work.request_id, num_tokens=last.num_tokens, block_ids=last.block_ids
            )
            await engine.line.send(Offered(work.request_id, offer.ticket))
        else:
            offer = await engine.engine.offer(
                work.request_id,
                num_tokens=0,
                block_ids={group: [] for group in tables},
                total=len(prompt),
            )
            await engine.line.send(Offered(work.request_id, offer.ticket))
            try:
                async for last in passes:
                    await offer.extend(last.num_tokens, last.block_ids)
                await offer.seal()
            except KVBusError:
                await offer.withdraw()
                raise
        num_blocks = sum(map(len, tables.values()))
        await engine.line.send(Prefilled(work.request_id, last.step, num_blocks, last.at_s))
        await offer.freed()

    async def _compute(self, prompt: list[int], tables: Tables) -> AsyncIterator[ComputedPass]:
        """Pass by pass, so that the requests take turns on the device."""
        engine, num_before = self._engine, 0
        size = engine.setup.shape.block_size
        passes = Generation(engine.model, engine.kv, tables).prefill(prompt, self._chunk)
        while (computed := await engine.compute(lambda: next(passes, None))) is not None:
            num_tokens, step = computed
            new = slice(num_blocks_for(num_before, size), num_blocks_for(num_tokens, size))
            ids = {group: table.array()[new].tolist() for group, table in tables.items()}
            yield ComputedPass(num_tokens, ids, step, time.monotonic())
            num_before = num_tokens


if __name__ == "__main__":
    run_engine(lambda engine: engine.serve({Prefill: PrefillRequests(engine).handle}))
