"""The requests of a prefill engine on a device that no agent maps: saved into the ring as computed.

Refuses to hold the device's blocks for a reader: they are free once they are saved.
"""

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from kvbus.demo.engine import Engine
from kvbus.demo.generate import encode, prefill_passes
from kvbus.demo.paged_cache import Tables
from kvbus.demo.prefill_requests import Passes
from kvbus.demo.request_blocks import new_blocks, num_blocks, prefill_blocks
from kvbus.demo.serving import answer
from kvbus.demo.step import Step
from kvbus.demo.work import Failed, Offered, Prefill, Prefilled
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError

RING_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Computed:
    """One pass: tokens so far, the token that follows, and when it was done."""

    num_tokens: int
    step: Step
    at_s: float


class HostRequests:
    """The requests of one prefill engine that goes through a ring."""

    def __init__(self, engine: Engine, host: HostPrefill) -> None:
        self._engine, self._host = engine, host

    async def handle(self, work: Prefill) -> None:
        """One request, from its prompt to the release of the ring's blocks."""
        engine, prompt = self._engine, encode(work.prompt)
        wanted = {group.name: prefill_blocks(group, len(prompt)) for group in engine.spec.groups}
        tables = await engine.pools.take(wanted)
        chunk = engine.setup.prefill_chunk
        passes = prefill_passes(
            engine.model, engine.kv, tables, prompt=prompt, tokens_per_pass=chunk
        )
        offer: HostOffer | None = None
        try:
            ahead = await self._compute(passes) if chunk is None else None
            offer = await self._host.begin(
                work.request_id, num_tokens=len(prompt), wait_s=RING_WAIT_S
            )
            await self._serve(work, offer, tables, self._computed(passes, ahead))
        except KVBusError as error:
            answer(Failed(work.request_id, error.code, error.message))
            if offer is not None:
                with suppress(KVBusError):  # the agent is gone
                    await offer.abort()
        engine.pools.give(tables)

    async def _serve(
        self, work: Prefill, offer: HostOffer, tables: Tables, computed: AsyncIterator[Computed]
    ) -> None:
        """Offer first, so that what is saved is read while the rest is computed and saved."""
        answer(Offered(work.request_id, await offer.offer()))
        num_before, size = 0, self._engine.setup.side.block_size
        async for one in computed:
            await offer.save(one.num_tokens, new_blocks(tables, size, num_before, one.num_tokens))
            num_before, last = one.num_tokens, one
        await offer.seal()
        answer(Prefilled(work.request_id, last.step, num_blocks(tables), last.at_s))

    async def _computed(self, passes: Passes, ahead: Computed | None) -> AsyncIterator[Computed]:
        """``ahead`` and then the passes that are left."""
        one = ahead or await self._compute(passes)
        while one is not None:
            yield one
            one = await self._compute(passes)

    async def _compute(self, passes: Passes) -> Computed | None:
        computed = await self._engine.compute(lambda: next(passes, None))
        return None if computed is None else Computed(*computed, time.monotonic())
