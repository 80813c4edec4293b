"""What a prefill engine of a chaos run does: computes offers, and uses its blocks anew at once.

Blocks are written over in the callback of ``released`` (`OverwritingPrefill`), and handed out
again.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import anyio

from kvbus.engine import KeptSession, Offer
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import ClosedError, KVBusError, RequestRefused
from kvbus.geometry import num_blocks_for
from tests.chaos.engine_memory import EngineMemory
from tests.chaos.pattern import fill
from tests.chaos.strictness import ChaosPrefill

ROOM_WITHIN_S = 2.0
STEP_S = 0.02
PIECE_BYTES = 256 << 10


class PrefillSide:
    """The offers of an engine, by the session that there is."""

    def __init__(
        self, memory: EngineMemory, control: KeptSession[ChaosPrefill], tell: Callable[..., None]
    ) -> None:
        self._memory, self.control, self._tell = memory, control, tell
        self._views, self._pool = memory.views, memory.pool
        self._offers: dict[int, Offer | HostOffer] = {}
        self._num_unknown = 0
        self._host: HostPrefill | None = None
        if memory.ring is not None:
            self._host = HostPrefill(control.latest, *memory.ring, piece_bytes=PIECE_BYTES)

    @property
    def num_held(self) -> int:
        """Blocks that are not free, but those of offers that nobody answered."""
        ring = self._memory.ring[0].num_held if self._memory.ring is not None else 0
        return self._pool.num_held - self._num_unknown + ring

    def check(self) -> None:
        """Nothing may change a prefill engine's memory but itself."""
        self._pool.check()

    async def obey(self, order: dict[str, Any]) -> None:
        """``offer`` or ``withdraw``."""
        if order["do"] == "withdraw":
            await self._withdraw(order["offer"])
            return
        key, steps = order["key"], order["steps"]
        groups = self._memory.spec.groups
        blocks = self._pool.take(
            {group.name: num_blocks_for(steps[-1], group.block_size) for group in groups},
            f"offer {key}",
        )
        if blocks is None:
            self._tell("refused", key=key, code="full")
            return
        make = self._offer if self._host is None else self._offer_by_ring
        try:
            await make(order, blocks)
        finally:
            self._offers.pop(key, None)
            self._pool.give(blocks)

    async def _withdraw(self, key: int) -> None:
        """An offer that has ended is withdrawn well."""
        offer = self._offers.get(key)
        try:
            if isinstance(offer, HostOffer):
                await offer.abort()
            elif offer is not None:
                await offer.withdraw()
        except KVBusError:
            return

    async def _offer(self, order: dict[str, Any], blocks: dict[str, list[int]]) -> None:
        """Until it is released, or its session has ended."""
        key, steps, session = order["key"], order["steps"], self.control.latest
        fill(key, self._views, blocks, 0, steps[0])
        try:
            offer = await session.offer(
                f"{key}",
                num_tokens=steps[0],
                block_ids=self._between(blocks, 0, steps[0]),
                sealed=len(steps) == 1,
                ttl_s=order["ttl_s"],
                transfer_id=order.get("transfer_id"),
            )
        except KVBusError as error:
            self._tell("refused", key=key, code=error.code.value)
            if not isinstance(error, RequestRefused):
                await self._unknown_until_the_end(session, blocks)
            return
        self._offers[key] = offer
        self._tell("offered", key=key, offer_id=offer.offer_id, ticket=offer.ticket)
        with suppress(KVBusError):  # it has ended, or will by its time to live
            await self._grow(offer, key, steps, blocks)
        await self._follow(key, offer)

    async def _unknown_until_the_end(
        self, session: ChaosPrefill, blocks: dict[str, list[int]]
    ) -> None:
        """Nobody said whether the offer was made: its blocks are the engine's with the session."""
        number = sum(map(len, blocks.values()))
        self._num_unknown += number
        try:
            await session.ended()
        finally:
            self._num_unknown -= number

    async def _grow(
        self, offer: Offer, key: int, steps: list[int], blocks: dict[str, list[int]]
    ) -> None:
        for before, now in pairwise(steps):
            await anyio.sleep(STEP_S)
            fill(key, self._views, blocks, before, now)
            await offer.extend(now, self._between(blocks, before, now))
        if len(steps) > 1:
            await offer.seal()

    async def _offer_by_ring(self, order: dict[str, Any], blocks: dict[str, list[int]]) -> None:
        """Saved piece by piece; what is saved is the engine's to change at once."""
        key, steps = order["key"], order["steps"]
        assert self._host is not None
        try:
            offer = await self._host.begin(f"{key}", num_tokens=steps[-1], wait_s=ROOM_WITHIN_S)
        except KVBusError as error:
            self._tell("refused", key=key, code=error.code.value)
            return
        self._offers[key] = offer
        self._host.session = self.control.latest
        try:
            ticket = await offer.offer(ttl_s=order["ttl_s"])
        except KVBusError as error:
            await self._abort(offer)
            self._tell("refused", key=key, code=error.code.value)
            return
        self._tell("offered", key=key, offer_id=offer.offer_id, ticket=ticket)
        try:
            for before, now in pairwise([0, *steps]):
                fill(key, self._views, blocks, before, now)
                await offer.save(now, self._between(blocks, before, now))
            await offer.seal()
        except KVBusError:
            await self._abort(offer)
        await self._follow(key, offer)

    async def _abort(self, offer: HostOffer) -> None:
        with suppress(KVBusError):  # then it ends by its time to live, or with the session
            await offer.abort()

    async def _follow(self, key: int, offer: Offer | HostOffer) -> None:
        """A session ends with its agent; its keeper closes none that something waits for."""
        try:
            outcome = str((await offer.released()).value)
        except KVBusError as error:
            outcome = "lost"
            if isinstance(error, ClosedError):
                self.control.latest.report("closed_early", f"offer {key}: {error}")
        self._tell("over", key=key, outcome=outcome)

    def _between(self, blocks: dict[str, list[int]], start: int, stop: int) -> dict[str, list[int]]:
        some = {}
        for group in self._memory.spec.groups:
            first, end = (num_blocks_for(at, group.block_size) for at in (start, stop))
            some[group.name] = blocks[group.name][first:end]
        return some
