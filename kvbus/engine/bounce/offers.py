"""Saves the KV of a prefill engine into host blocks, piece by piece, and offers it from there.

The engine's own blocks are the engine's again once `HostOffer.save` is done; the host blocks are
free when the offer has ended.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio

from kvbus.engine.bounce.copies import (
    Copier,
    Direction,
    RequestBlocks,
    block_tables,
    blocks_of,
    check_groups,
)
from kvbus.engine.bounce.pool import PIECE_BYTES, HostPool, piece_tokens
from kvbus.engine.later import Later
from kvbus.engine.link import Link
from kvbus.engine.offers import BlockIds, Offer
from kvbus.errors import ClosedError, GeometryError, KVBusError, LocalError
from kvbus.geometry import BlockTable
from kvbus.planning import Spans
from kvbus.protocol.engine import Outcome


class HostPrefill:
    """Makes the offers of one prefill engine that goes through host blocks.

    About ``piece_bytes`` are saved at a time: small enough that a piece is on the wire while the
    next is saved. Its calls, and those of its offers, return at once, in any thread; what they
    return may be waited for.
    """

    def __init__(
        self,
        link: Link,
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.link, self.pool, self.copier = link, pool, copier
        self.piece_tokens = piece_tokens(link.engine, piece_bytes=piece_bytes)

    def begin(
        self,
        request_id: str,
        *,
        num_tokens: int,
        first_blocks: Mapping[str, int] | None = None,
        wait_s: float = 0.0,
    ) -> "Later[HostOffer]":
        """Acquire host blocks for a request of ``num_tokens`` tokens; nothing is offered yet.

        Of a group with a window the engine may keep only the tail: ``first_blocks`` says from which
        block of the request on. Waits for room for at most ``wait_s``. Raises `LocalError`
        (``busy``) when there is none, and `GeometryError` when there never will be enough.
        """
        begin = partial(self._begin, request_id, num_tokens, dict(first_blocks or {}), wait_s)
        return self.link.runner.start(begin)

    async def _begin(
        self, request_id: str, num_tokens: int, given: Mapping[str, int], wait_s: float
    ) -> "HostOffer":
        engine = self.link.engine
        check_groups(engine, given)
        firsts = {group.name: given.get(group.name, 0) for group in engine.groups}
        wanted = {
            group.name: blocks_of(group, num_tokens, first=firsts[group.name])
            for group in engine.groups
        }
        host_tables = await self.pool.acquire(wanted, wait_s=wait_s)
        device_tables = {name: BlockTable(b"", first) for name, first in firsts.items()}
        blocks = RequestBlocks(engine, host_tables, device_tables)
        return HostOffer(self, request_id, num_tokens, blocks)


class HostOffer:
    """One request: `save` what is computed, `offer` it before or after, and `seal`; or `abort`.

    ``num_saved`` of its ``num_tokens`` tokens are on the host. After a `save` that failed there is
    only `abort`.
    """

    def __init__(
        self, host: HostPrefill, request_id: str, num_tokens: int, blocks: RequestBlocks
    ) -> None:
        self.request_id, self.num_tokens, self.num_saved = request_id, num_tokens, 0
        self._host, self._blocks = host, blocks
        self._runner = host.link.runner
        self._states_at: dict[str, int] = {}
        self._offer: Offer | None = None
        self._saves, self._step = anyio.Lock(), anyio.Lock()
        self._is_copying = self._is_over = False
        self._closed = ""

    @property
    def offer_id(self) -> str:
        """The agent's id of the offer; raises `LocalError` before `offer`."""
        return self._offered().offer_id

    @property
    def ended(self) -> Later[Outcome]:
        """`Offer.ended`: the host blocks are free then, or when the piece that is being copied is.

        Raises `LocalError` before `offer`.
        """
        return self._offered().ended

    def save(self, num_tokens: int, block_ids: BlockIds) -> Later[None]:
        """Copy what was computed since the last call: ``num_tokens`` tokens are ready in all.

        ``block_ids`` are the engine's new blocks by group, in order of position; a block that was
        filled partly is gone on with. Of a state, its block as it is after these tokens. It is done
        when the copies are: the engine may then use the blocks for something else. What is saved is
        offered piece by piece when `offer` was called before. Saves follow each other in the order
        of the calls.

        Raises `GeometryError` for ids that are no unsigned 32-bit integers. It fails with
        `GeometryError` for blocks that do not fit the tokens, `ClosedError` after the end and after
        `seal`, `RequestRefused` when the offer has ended, and what the engine's copy function
        raised.
        """
        return self._runner.start(partial(self._save, num_tokens, block_tables(block_ids)))

    def offer(self, *, ttl_s: float | None = None, traceparent: str = "") -> Later[dict[str, Any]]:
        """Offer what is saved, and what will be: the ticket. Fails with `RequestRefused`.

        A `save` may be under way: what it copies is offered after this.
        """
        return self._runner.start(partial(self._make_offer, ttl_s, traceparent))

    def seal(self) -> Later[None]:
        """Say that all is saved; fails with `GeometryError` when something is not."""
        return self._runner.start(self._seal)

    def abort(self) -> Later[None]:
        """Give the request up; an offer is withdrawn, one that has ended is ok.

        The host blocks are free at once, or when the piece that is being copied is. Fails with what
        a request to the agent can: `RequestTimeout`.
        """
        return self._runner.start(self._abort)

    async def _save(self, num_tokens: int, given: Mapping[str, BlockTable]) -> None:
        async with self._saves:
            self._check_open()
            self._check_progress(num_tokens)
            self._blocks.add(num_tokens, given)
            groups = self._blocks.engine.groups
            states = [group.name for group in groups if group.state and given.get(group.name)]
            try:
                for stop in self._ends_of_pieces(num_tokens):
                    await self._save_piece(stop, states=[])
                await self._save_piece(num_tokens, states=states)
            except BaseException:
                self._closed = self._closed or "a save of it did not end well"
                raise

    async def _make_offer(self, ttl_s: float | None, traceparent: str) -> dict[str, Any]:
        async with self._step:
            self._check_open()
            if self._offer is not None:
                raise LocalError(f"request '{self.request_id}' is offered already")
            offer = await self._host.link.offer(
                self.request_id,
                num_tokens=self.num_saved,
                block_ids=self._blocks.on_host(0, self.num_saved),
                sealed=False,
                ttl_s=ttl_s,
                first_blocks=self._blocks.first_blocks,
                traceparent=traceparent,
            )
            self._offer = offer
            offer.ended.then(self._end)
        return offer.ticket

    async def _seal(self) -> None:
        async with self._step:
            self._check_open()
            self._check_complete()
            offer = self._offered()
            self._closed = "it is sealed"
            await offer.seal()

    async def _abort(self) -> None:
        self._closed = self._closed or "it was aborted"
        async with self._step:
            if self._offer is None:
                self._end()
            elif not self._is_over:
                try:
                    await self._offer.withdraw()
                except KVBusError:
                    if not self._is_over:
                        raise

    def _ends_of_pieces(self, num_tokens: int) -> range:
        """Those in front of the last one, which ends at ``num_tokens``."""
        size = self._host.piece_tokens
        return range((self.num_saved // size + 1) * size, num_tokens, size) if size else range(0)

    async def _save_piece(self, stop: int, *, states: list[str]) -> None:
        start = self.num_saved
        groups = [group for group in self._blocks.engine.groups if not group.state]
        spans = {group.name: (start, stop) for group in groups} | dict.fromkeys(states, (0, 1))
        await self._copy(spans)
        async with self._step:  # who was cancelled meanwhile has nothing offered
            self._check_open()
            self.num_saved = stop
            self._states_at |= dict.fromkeys(states, stop)
            if self._offer is not None:
                await self._offer.extend(stop, self._blocks.on_host(start, stop))

    async def _copy(self, spans: Spans) -> None:
        """The host blocks are not released while anything is copied into them."""
        self._check_open()
        copies = self._blocks.copies(spans)
        if not copies:
            return
        self._is_copying = True
        try:
            with anyio.CancelScope(shield=True):
                await self._host.copier(Direction.SAVE, copies)
        finally:
            self._is_copying = False
            if self._is_over:
                self._release()

    def _check_progress(self, num_tokens: int) -> None:
        if not self.num_saved <= num_tokens <= self.num_tokens:
            raise GeometryError(
                f"{num_tokens} tokens are said to be ready, of {self.num_tokens}, after "
                f"{self.num_saved}",
                field="num_tokens",
            )

    def _check_complete(self) -> None:
        lacking = [
            group.name
            for group in self._blocks.engine.groups
            if group.state and self._states_at.get(group.name, 0) != self.num_tokens
        ]
        if self.num_saved < self.num_tokens or lacking:
            raise GeometryError(
                f"{self.num_saved} of {self.num_tokens} tokens of request '{self.request_id}' are "
                f"saved{', not the last state of ' + ', '.join(lacking) if lacking else ''}: save "
                "the rest first",
                num_tokens=self.num_saved,
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"request '{self.request_id}' is over: {self._closed}")

    def _offered(self) -> Offer:
        if self._offer is None:
            raise LocalError(f"request '{self.request_id}' is not offered yet: call offer()")
        return self._offer

    def _end(self) -> None:
        """Nobody reads the host blocks any more."""
        self._closed = self._closed or "its offer has ended"
        if not self._is_over:
            self._is_over = True
            if not self._is_copying:
                self._release()

    def _release(self) -> None:
        """Of `_end` and the end of a copy, the later one comes here, once."""
        self._host.pool.release(self._blocks.host_tables)
