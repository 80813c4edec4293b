"""The requests of a prefill engine whose cache the agent maps: offered where they were computed.

Refuses to reuse the blocks of an offer before the agent says that it is released.
"""

import time
from collections.abc import Iterator
from contextlib import suppress

from kvbus.demo.engine import Engine
from kvbus.demo.generate import encode, prefill_passes
from kvbus.demo.paged_cache import Tables
from kvbus.demo.request_blocks import new_blocks, num_blocks, prefill_blocks
from kvbus.demo.serving import answer
from kvbus.demo.step import Step
from kvbus.demo.work import Failed, Offered, Prefill, Prefilled
from kvbus.engine import Offer, PrefillSession
from kvbus.errors import RequestRefused

Passes = Iterator[tuple[int, Step]]


class PrefillRequests:
    """The requests of one prefill engine whose cache the agent maps."""

    def __init__(self, engine: Engine, session: PrefillSession) -> None:
        self._engine, self._session = engine, session
        self._size = engine.setup.side.block_size

    async def handle(self, work: Prefill) -> None:
        """One request, from its prompt to the release of its blocks."""
        engine, prompt = self._engine, encode(work.prompt)
        wanted = {group.name: prefill_blocks(group, len(prompt)) for group in engine.spec.groups}
        tables = await engine.pools.take(wanted)
        chunk = engine.setup.prefill_chunk
        passes = prefill_passes(
            engine.model, engine.kv, tables, prompt=prompt, tokens_per_pass=chunk
        )
        offering = self._compute_and_offer if chunk is None else self._offer_and_compute
        offer = await offering(work, tables, passes)
        if offer is not None:
            await offer.released()
        engine.pools.give(tables)

    async def _compute_and_offer(
        self, work: Prefill, tables: Tables, passes: Passes
    ) -> Offer | None:
        """The sealed offer of a whole prompt; None when the agent refused it."""
        num_tokens, step = await self._engine.compute(lambda: next(passes))
        computed_at_s = time.monotonic()
        try:
            offer = await self._session.offer(
                work.request_id,
                num_tokens=num_tokens,
                block_ids={group: table.array() for group, table in tables.items()},
            )
        except RequestRefused as error:
            answer(Failed(work.request_id, error.code, error.message))
            return None
        answer(Offered(work.request_id, offer.ticket))
        answer(Prefilled(work.request_id, step, num_blocks(tables), computed_at_s))
        return offer

    async def _offer_and_compute(
        self, work: Prefill, tables: Tables, passes: Passes
    ) -> Offer | None:
        """The offer, open from before the first pass, so that it is read while this computes."""
        try:
            offer = await self._session.offer(
                work.request_id,
                num_tokens=0,
                block_ids={group: [] for group in tables},
                sealed=False,
            )
        except RequestRefused as error:
            answer(Failed(work.request_id, error.code, error.message))
            return None
        answer(Offered(work.request_id, offer.ticket))
        try:
            step, computed_at_s = await self._extend(offer, tables, passes)
            await offer.seal()
        except RequestRefused as error:
            answer(Failed(work.request_id, error.code, error.message))
            with suppress(RequestRefused):  # it has ended already
                await offer.withdraw()
            return offer
        answer(Prefilled(work.request_id, step, num_blocks(tables), computed_at_s))
        return offer

    async def _extend(self, offer: Offer, tables: Tables, passes: Passes) -> tuple[Step, float]:
        """Add what each pass computed to the offer; the token after the last pass, and its time."""
        num_before = 0
        while (computed := await self._engine.compute(lambda: next(passes, None))) is not None:
            num_tokens, step = computed
            computed_at_s = time.monotonic()
            await offer.extend(num_tokens, new_blocks(tables, self._size, num_before, num_tokens))
            num_before = num_tokens
        return step, computed_at_s
