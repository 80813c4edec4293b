"""Saves the KV of a prefill engine into host blocks, piece by piece, and offers it from there.

The engine's own blocks are the engine's again once `HostOffer.save` is done; the host blocks are
free when the offer has ended.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio

from kvbus.engine.bounce.copies import Copier, Direction, RequestBlocks, blocks_of
from kvbus.engine.bounce.pool import PIECE_BYTES, HostPool, piece_tokens
from kvbus.engine.later import Later
from kvbus.engine.link import Link
from kvbus.engine.offers import BlockIds, Offer, check_groups, tables_of
from kvbus.errors import ClosedError, GeometryError
from kvbus.geometry import BlockTable
from kvbus.planning import Spans


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

    def offer(
        self,
        request_id: str,
        *,
        num_tokens: int,
        first_blocks: Mapping[str, int] | None = None,
        wait_s: float = 0.0,
        ttl_s: float | None = None,
        traceparent: str = "",
    ) -> "Later[HostOffer]":
        """Acquire host blocks for a request of ``num_tokens`` tokens, and offer what will be saved.

        Of a group with a window the engine may keep only the tail: ``first_blocks`` says from which
        block of the request on. Waits for room for at most ``wait_s``. Raises `LocalError`
        (``busy``) when there is none, `GeometryError` when there never will be enough, and what the
        agent refuses.
        """
        options = {"ttl_s": ttl_s, "traceparent": traceparent}
        firsts = dict(first_blocks or {})
        offer = partial(self._offer, request_id, num_tokens, firsts, wait_s, options)
        return self.link.runner.start(offer)

    async def _offer(
        self,
        request_id: str,
        num_tokens: int,
        firsts: dict[str, int],
        wait_s: float,
        options: dict[str, Any],
    ) -> "HostOffer":
        engine = self.link.engine
        check_groups(engine, firsts)
        wanted = {
            group.name: blocks_of(group, num_tokens, first=firsts.setdefault(group.name, 0))
            for group in engine.groups
        }
        host_tables = await self.pool.acquire(wanted, wait_s=wait_s)
        device_tables = {name: BlockTable(b"", first) for name, first in firsts.items()}
        blocks = RequestBlocks(engine, host_tables, device_tables)
        try:
            offer = self.link.offer(
                request_id,
                num_tokens=0,
                block_ids=blocks.on_host(0, 0),
                sealed=False,
                first_blocks=firsts,
                **options,
            )
        except BaseException:
            self.pool.release(host_tables)
            raise
        made = HostOffer(self, offer, blocks, num_tokens)
        await offer
        return made


class HostOffer:
    """One offer: `save` what is computed, and `seal`; or `withdraw`.

    ``num_saved`` of its ``num_tokens`` tokens are on the host. After a `save` that failed there is
    only `withdraw`. ``ended`` is `Offer.ended`: the host blocks are free then, or when the piece
    that is being copied is.
    """

    def __init__(
        self, host: HostPrefill, offer: Offer, blocks: RequestBlocks, num_tokens: int
    ) -> None:
        self.request_id, self.num_tokens, self.num_saved = offer.request_id, num_tokens, 0
        self.ended = offer.ended
        self._host, self._offer, self._blocks = host, offer, blocks
        self._states_at: dict[str, int] = {}
        self._turn, self._is_copying = anyio.Lock(), False
        self._closed = ""
        """Why nothing more can be saved."""
        self.ended.then(partial(self._close, "its offer has ended"))
        self.ended.then(self._release)

    @property
    def offer_id(self) -> str:
        """The agent's id of the offer."""
        return self._offer.offer_id

    @property
    def ticket(self) -> dict[str, Any]:
        """The JSON-able ticket for the decode engine, which reads while the rest is computed."""
        return self._offer.ticket

    def save(self, num_tokens: int, block_ids: BlockIds) -> Later[None]:
        """Copy what was computed since the last call: ``num_tokens`` tokens are ready in all.

        ``block_ids`` are the engine's new blocks by group, in order of position; a block that was
        filled partly is gone on with. Of a state, its block as it is after these tokens. It is done
        when the copies are: the engine may then use the blocks for something else. What is saved is
        offered piece by piece. Saves, and `seal`, follow each other in the order of the calls.

        Raises `GeometryError` for ids that are no unsigned 32-bit integers. It fails with
        `GeometryError` for blocks that do not fit the tokens, `ClosedError` after the end and after
        `seal`, `RequestRefused` when the offer has ended, and what the engine's copy function
        raised.
        """
        return self._host.link.runner.start(partial(self._save, num_tokens, tables_of(block_ids)))

    def seal(self) -> Later[None]:
        """Say that all is saved; fails with `GeometryError` when something is not."""
        return self._host.link.runner.start(self._seal)

    def withdraw(self) -> Later[None]:
        """Give the request up; without effect for an offer that has ended.

        The host blocks are free when it has ended, and the piece that is being copied is.
        """
        self._close("it was withdrawn")
        return self._offer.withdraw()

    async def _save(self, num_tokens: int, given: Mapping[str, BlockTable]) -> None:
        async with self._turn:
            self._check_open()
            if not self.num_saved <= num_tokens <= self.num_tokens:
                raise GeometryError(
                    f"{num_tokens} tokens are said to be ready, of {self.num_tokens}, after "
                    f"{self.num_saved}",
                    field="num_tokens",
                )
            self._blocks.add(num_tokens, given)
            groups, size = self._blocks.engine.groups, self._host.piece_tokens
            states = [group.name for group in groups if group.state and given.get(group.name)]
            first = (self.num_saved // size + 1) * size if size else num_tokens
            try:
                for stop in range(first, num_tokens, size or 1):
                    await self._save_piece(stop, states=[])
                await self._save_piece(num_tokens, states=states)
            except BaseException:
                self._close("a save of it did not end well")
                raise

    async def _save_piece(self, stop: int, *, states: list[str]) -> None:
        start = self.num_saved
        groups = [group for group in self._blocks.engine.groups if not group.state]
        spans = {group.name: (start, stop) for group in groups} | dict.fromkeys(states, (0, 1))
        await self._copy(spans)
        self._check_open()
        self.num_saved = stop
        self._states_at |= dict.fromkeys(states, stop)
        await self._offer.extend(stop, self._blocks.on_host(start, stop))

    async def _copy(self, spans: Spans) -> None:
        """The host blocks are not released while anything is copied into them."""
        self._check_open()
        if not (copies := self._blocks.copies(spans)):
            return
        self._is_copying = True
        try:
            with anyio.CancelScope(shield=True):
                await self._host.copier(Direction.SAVE, copies)
        finally:
            self._is_copying = False
            if self.ended.done():
                self._release()

    async def _seal(self) -> None:
        async with self._turn:
            self._check_open()
            lacking = [
                group.name
                for group in self._blocks.engine.groups
                if group.state and self._states_at.get(group.name, 0) != self.num_tokens
            ]
            if self.num_saved < self.num_tokens or lacking:
                raise GeometryError(
                    f"{self.num_saved} of {self.num_tokens} tokens of request '{self.request_id}' "
                    f"are saved{', not the last state of ' + ', '.join(lacking) if lacking else ''}"
                    ": save the rest first",
                    num_tokens=self.num_saved,
                )
            self._close("it is sealed")
        await self._offer.seal()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"request '{self.request_id}' is over: {self._closed}")

    def _close(self, why: str) -> None:
        self._closed = self._closed or why

    def _release(self) -> None:
        """Of the end and that of a copy, the later one releases: then nobody reads or writes."""
        if not self._is_copying:
            self._host.pool.release(self._blocks.host_tables)
