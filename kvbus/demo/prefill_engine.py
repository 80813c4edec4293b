"""The demo's prefill engine, a process: computes prompts and offers their KV.

Refuses to reuse blocks that may still be read: those of an offer, before the agent says that it is
released, or, on a device that no agent maps, those that are not saved into the ring yet.
"""

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from kvbus.demo.blocks import Tables, prefill_blocks
from kvbus.demo.engine import PATIENCE_S, DemoEngine, run_engine
from kvbus.demo.messages import Failed, Offered, Prefill, Prefilled, Step
from kvbus.demo.model import Generation
from kvbus.demo.prompts import encode
from kvbus.engine import PrefillSession
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError, RequestRefused
from kvbus.geometry import num_blocks_for


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """One pass: tokens so far, its new blocks by group, the token that follows, and when."""

    num_tokens: int
    block_ids: dict[str, list[int]]
    step: Step
    at_s: float


Passes = AsyncIterator[ComputedPass]


class PrefillRequests:
    """The requests of one prefill engine."""

    def __init__(self, engine: DemoEngine[PrefillSession]) -> None:
        self._engine, self._chunk = engine, engine.setup.prefill_chunk
        self._host = HostPrefill(engine.session, *engine.ring) if engine.ring else None

    async def handle(self, work: Prefill) -> None:
        """One request, from its prompt to the moment when its blocks may be used again.

        A whole prompt is computed before it is offered. Chunks are offered first, so that what is
        there is read while this computes.
        """
        engine, prompt = self._engine, encode(work.prompt)
        tables = await engine.take(lambda group: prefill_blocks(group, len(prompt)))
        passes = self._compute(prompt, tables)
        try:
            done = [await anext(passes)] if self._chunk is None else []
            if self._host is None:
                await self._offer(work, tables, passes, done)
            else:
                begun = await self._host.begin(
                    work.request_id, num_tokens=len(prompt), wait_s=PATIENCE_S
                )
                await self._save(work, begun, tables, passes, done)
        except KVBusError as error:
            await engine.line.send(Failed(work.request_id, error.code, error.message))
        engine.blocks.give(tables)

    async def _compute(self, prompt: list[int], tables: Tables) -> Passes:
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

    async def _offer(
        self, work: Prefill, tables: Tables, passes: Passes, done: list[ComputedPass]
    ) -> None:
        """Sealed at once when all is ``done``."""
        num_tokens, ids = 0, {group: list[int]() for group in tables}
        if done:
            num_tokens, ids = done[0].num_tokens, done[0].block_ids
        offer = await self._engine.session.offer(
            work.request_id, num_tokens=num_tokens, block_ids=ids, sealed=bool(done)
        )
        await self._engine.line.send(Offered(work.request_id, offer.ticket))
        try:
            if not done:
                async for one in passes:
                    await offer.extend(one.num_tokens, one.block_ids)
                    done.append(one)
                await offer.seal()
        except RequestRefused:
            with suppress(RequestRefused):  # it has ended already
                await offer.withdraw()
            await offer.ended
            raise
        await self._tell_prefilled(work, tables, done[-1])
        await offer.ended

    async def _save(
        self,
        work: Prefill,
        offer: HostOffer,
        tables: Tables,
        passes: Passes,
        done: list[ComputedPass],
    ) -> None:
        """Offered first: what is saved is read while the rest is computed and saved."""
        try:
            await self._engine.line.send(Offered(work.request_id, await offer.offer()))
            for one in done:
                await offer.save(one.num_tokens, one.block_ids)
            async for one in passes:
                await offer.save(one.num_tokens, one.block_ids)
                done.append(one)
            await offer.seal()
        except KVBusError:
            with suppress(KVBusError):  # the agent is gone
                await offer.abort()
            raise
        await self._tell_prefilled(work, tables, done[-1])

    async def _tell_prefilled(self, work: Prefill, tables: Tables, last: ComputedPass) -> None:
        num_blocks = sum(map(len, tables.values()))
        await self._engine.line.send(Prefilled(work.request_id, last.step, num_blocks, last.at_s))


if __name__ == "__main__":
    run_engine(
        PrefillSession, lambda engine: engine.serve({Prefill: PrefillRequests(engine).handle})
    )
