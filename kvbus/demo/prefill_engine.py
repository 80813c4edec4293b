"""The demo's prefill engine, a process: computes prompts and offers their KV.

Refuses to reuse blocks that may still be read: those of an offer, before the agent says that it is
released, or, on a device that no agent maps, those that are not saved into the ring yet.
"""

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from kvbus.demo.blocks import Tables, most_prefill_blocks, prefill_blocks
from kvbus.demo.engine import PATIENCE_S, DemoEngine, attached_engine, run_engine
from kvbus.demo.generate import encode
from kvbus.demo.line import Line
from kvbus.demo.messages import EngineSetup, Failed, Offered, Prefill, Prefilled, Step, Work
from kvbus.engine import PrefillSession
from kvbus.engine.bounce import HostPrefill
from kvbus.errors import KVBusError, RequestRefused
from kvbus.geometry import num_blocks_for


async def main(setup: EngineSetup, line: Line[Work]) -> None:
    """Attach, and serve until the driver closes the line."""
    attached = attached_engine(setup, line, PrefillSession, most_prefill_blocks)
    async with attached as (engine, session):
        host = None
        if engine.ring is not None and engine.copier is not None:
            host = HostPrefill(session, engine.ring, engine.copier)
        requests = PrefillRequests(engine, session, host)
        await engine.serve(session.agent.peer_endpoint, {Prefill: requests.handle})


@dataclass(frozen=True, slots=True)
class ComputedPass:
    """One pass: tokens so far, its new blocks by group, the token that follows, and when."""

    num_tokens: int
    block_ids: dict[str, list[int]]
    step: Step
    at_s: float


Passes = AsyncIterator[ComputedPass]


class PrefillRequests:
    """The requests of one prefill engine; ``host``, for one whose cache no agent maps."""

    def __init__(
        self, engine: DemoEngine, session: PrefillSession, host: HostPrefill | None
    ) -> None:
        self._engine, self._session, self._host = engine, session, host
        self._is_chunked = engine.setup.prefill_chunk is not None

    async def handle(self, work: Prefill) -> None:
        """One request, from its prompt to the moment when its blocks may be used again."""
        engine, prompt = self._engine, encode(work.prompt)
        wanted = {group.name: prefill_blocks(group, len(prompt)) for group in engine.spec.groups}
        tables = await engine.blocks.take(wanted)
        passes = self._compute(prompt, tables)
        try:
            if self._host is not None:
                await self._save(work, len(prompt), self._host, passes)
            elif self._is_chunked:
                await self._offer_in_chunks(work, tables, passes)
            else:
                await self._offer_whole(work, passes)
        except KVBusError as error:
            await engine.line.send(Failed(work.request_id, error.code, error.message))
        engine.blocks.give(tables)

    async def _compute(self, prompt: list[int], tables: Tables) -> Passes:
        """Pass by pass, so that the requests take turns on the device."""
        setup, num_before = self._engine.setup, 0
        passes = self._engine.generation(tables).prefill(prompt, setup.prefill_chunk)
        size = setup.shape.block_size
        while (computed := await self._engine.compute(lambda: next(passes, None))) is not None:
            num_tokens, step = computed
            new = slice(num_blocks_for(num_before, size), num_blocks_for(num_tokens, size))
            ids = {group: table.array()[new].tolist() for group, table in tables.items()}
            yield ComputedPass(num_tokens, ids, step, time.monotonic())
            num_before = num_tokens

    async def _offer_whole(self, work: Prefill, passes: Passes) -> None:
        computed = await anext(passes)
        offer = await self._session.offer(
            work.request_id, num_tokens=computed.num_tokens, block_ids=computed.block_ids
        )
        await self._engine.line.send(Offered(work.request_id, offer.ticket))
        await self._tell_prefilled(work, [computed])
        await offer.released()

    async def _offer_in_chunks(self, work: Prefill, tables: Tables, passes: Passes) -> None:
        """The offer is open from before the first pass, so that it is read while this computes."""
        offer = await self._session.offer(
            work.request_id, num_tokens=0, block_ids={group: [] for group in tables}, sealed=False
        )
        await self._engine.line.send(Offered(work.request_id, offer.ticket))
        done: list[ComputedPass] = []
        try:
            async for one in passes:
                await offer.extend(one.num_tokens, one.block_ids)
                done.append(one)
            await offer.seal()
        except RequestRefused:
            with suppress(RequestRefused):  # it has ended already
                await offer.withdraw()
            await offer.released()
            raise
        await self._tell_prefilled(work, done)
        await offer.released()

    async def _save(
        self, work: Prefill, num_tokens: int, host: HostPrefill, passes: Passes
    ) -> None:
        """Offered first, so that what is saved is read while the rest is computed and saved.

        A whole prompt is computed before that: it would only hold blocks of the ring meanwhile.
        """
        ahead = [] if self._is_chunked else [await anext(passes)]
        offer = await host.begin(work.request_id, num_tokens=num_tokens, wait_s=PATIENCE_S)
        done: list[ComputedPass] = []
        try:
            await self._engine.line.send(Offered(work.request_id, await offer.offer()))
            async for one in _joined(ahead, passes):
                await offer.save(one.num_tokens, one.block_ids)
                done.append(one)
            await offer.seal()
        except KVBusError:
            with suppress(KVBusError):  # the agent is gone
                await offer.abort()
            raise
        await self._tell_prefilled(work, done)

    async def _tell_prefilled(self, work: Prefill, done: list[ComputedPass]) -> None:
        num_blocks = sum(len(ids) for one in done for ids in one.block_ids.values())
        last = done[-1]
        await self._engine.line.send(
            Prefilled(work.request_id, last.step, num_blocks, computed_at_s=last.at_s)
        )


async def _joined(ahead: list[ComputedPass], rest: Passes) -> Passes:
    for one in ahead:
        yield one
    async for one in rest:
        yield one


if __name__ == "__main__":
    run_engine(main)
