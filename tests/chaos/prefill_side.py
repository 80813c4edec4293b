"""What a prefill engine of a chaos run does: computes offers, and uses its blocks anew at once.

Blocks are written over in the callback of ``released`` (`OverwritingPrefill`), and handed out
again.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import anyio

from kvbus.engine import Offer
from kvbus.engine.bounce import HostOffer, HostPrefill
from kvbus.errors import KVBusError, RequestRefused
from kvbus.geometry import num_blocks_for
from tests.chaos.engine_memory import EngineMemory
from tests.chaos.pattern import fill
from tests.chaos.strictness import ChaosPrefill

ROOM_WITHIN_S = 2.0
STEP_S = 0.02
PIECE_BYTES = 256 << 10


class PrefillSide:
    """The offers of one session."""

    def __init__(
        self, memory: EngineMemory, control: ChaosPrefill, tell: Callable[..., None]
    ) -> None:
        self._memory, self._control, self._tell = memory, control, tell
        self._views, self._pool = memory.views, memory.pool
        self._offers: dict[int, Offer | HostOffer] = {}
        self._orphans: list[dict[str, list[int]]] = []
        self._host: HostPrefill | None = None
        if memory.ring is not None:
            self._host = HostPrefill(control, *memory.ring, piece_bytes=PIECE_BYTES)

    @property
    def num_held(self) -> int:
        """Blocks that are not free, but those of offers that nobody answered."""
        lost = sum(len(ids) for blocks in self._orphans for ids in blocks.values())
        ring = self._memory.ring[0].num_held if self._memory.ring is not None else 0
        return self._pool.num_held - lost + ring

    def check(self) -> None:
        """Nothing may change a prefill engine's memory but itself."""
        self._pool.check()

    def close(self) -> None:
        """The session was lost: what was asked and not answered is the engine's again."""
        for blocks in self._orphans:
            self._pool.give(blocks)
        self._orphans = []

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
        is_known = True
        try:
            is_known = await make(order, blocks)
        finally:
            self._offers.pop(key, None)
            if is_known:
                self._pool.give(blocks)
            else:
                self._orphans.append(blocks)

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

    async def _offer(self, order: dict[str, Any], blocks: dict[str, list[int]]) -> bool:
        """Until it is released; False when nobody said whether it was made."""
        key, steps = order["key"], order["steps"]
        fill(key, self._views, blocks, 0, steps[0])
        try:
            offer = await self._control.offer(
                f"{key}",
                num_tokens=steps[0],
                block_ids=self._between(blocks, 0, steps[0]),
                sealed=len(steps) == 1,
                ttl_s=order["ttl_s"],
            )
        except KVBusError as error:
            self._tell("refused", key=key, code=error.code.value)
            return isinstance(error, RequestRefused) or self._control.lost is not None
        self._offers[key] = offer
        self._tell("offered", key=key, offer_id=offer.offer_id, ticket=offer.ticket)
        with suppress(KVBusError):  # it has ended, or will by its time to live
            await self._grow(offer, key, steps, blocks)
        await self._follow(key, offer)
        return True

    async def _grow(
        self, offer: Offer, key: int, steps: list[int], blocks: dict[str, list[int]]
    ) -> None:
        for before, now in pairwise(steps):
            await anyio.sleep(STEP_S)
            fill(key, self._views, blocks, before, now)
            await offer.extend(now, self._between(blocks, before, now))
        if len(steps) > 1:
            await offer.seal()

    async def _offer_by_ring(self, order: dict[str, Any], blocks: dict[str, list[int]]) -> bool:
        """Saved piece by piece; what is saved is the engine's to change at once."""
        key, steps = order["key"], order["steps"]
        assert self._host is not None
        try:
            offer = await self._host.begin(f"{key}", num_tokens=steps[-1], wait_s=ROOM_WITHIN_S)
        except KVBusError as error:
            self._tell("refused", key=key, code=error.code.value)
            return True
        self._offers[key] = offer
        try:
            ticket = await offer.offer(ttl_s=order["ttl_s"])
        except KVBusError as error:
            await self._abort(offer)
            self._tell("refused", key=key, code=error.code.value)
            return True
        self._tell("offered", key=key, offer_id=offer.offer_id, ticket=ticket)
        try:
            for before, now in pairwise([0, *steps]):
                fill(key, self._views, blocks, before, now)
                await offer.save(now, self._between(blocks, before, now))
            await offer.seal()
        except KVBusError:
            await self._abort(offer)
        await self._follow(key, offer)
        return True

    async def _abort(self, offer: HostOffer) -> None:
        with suppress(KVBusError):  # then it ends by its time to live, or with the session
            await offer.abort()

    async def _follow(self, key: int, offer: Offer | HostOffer) -> None:
        try:
            outcome = str((await offer.released()).value)
        except KVBusError:
            outcome = "lost"
        self._tell("over", key=key, outcome=outcome)

    def _between(self, blocks: dict[str, list[int]], start: int, stop: int) -> dict[str, list[int]]:
        some = {}
        for group in self._memory.spec.groups:
            first, end = (num_blocks_for(at, group.block_size) for at in (start, stop))
            some[group.name] = blocks[group.name][first:end]
        return some
