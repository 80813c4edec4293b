"""Saves of a prefill engine's KV into host blocks, piece by piece, and their offers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio

from kvbus.engine.bounce.copies import Copier, Direction, RequestBlocks, blocks_of
from kvbus.engine.bounce.pool import PIECE_BYTES, HostPool, piece_tokens
from kvbus.engine.later import Completion
from kvbus.engine.link import Link
from kvbus.engine.offers import BlockIds, Offer, check_groups, tables_of
from kvbus.errors import ClosedError, GeometryError
from kvbus.geometry import BlockTable
from kvbus.planning import Spans


class HostPrefill:
    """The offers of one prefill engine through host blocks.

    Calls return immediately, in any thread. Saves are about ``piece_bytes``, to overlap with
    transfers.
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
    ) -> "Completion[HostOffer]":
        """Acquire host blocks for ``num_tokens`` tokens, and offer them before they are saved.

        ``first_blocks``: the first block of the request, for groups with a window that keep only
        its tail. Waits up to ``wait_s`` for blocks. Raises `LocalError` (``busy``) when none are
        free, `GeometryError` when the buffer is too small, and the agent's refusals.
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
    """An offer from host blocks: `save` computed blocks and `seal`, or `withdraw`.

    ``num_saved`` tokens are on the host. After a failed `save`, only `withdraw` is possible. The
    host blocks are free at ``ended``, or after a copy that still runs then.
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
        self.ended.then(partial(self._close, "its offer has ended"))
        self.ended.then(self._release)

    @property
    def offer_id(self) -> str:
        return self._offer.offer_id

    @property
    def ticket(self) -> dict[str, Any]:
        """The JSON-able ticket; the decode engine may read during the prefill."""
        return self._offer.ticket

    def save(self, num_tokens: int, block_ids: BlockIds) -> Completion[None]:
        """Save the tokens since the last call; ``num_tokens`` tokens are ready in all.

        ``block_ids`` has the new blocks by group, in order of position; a partial last block
        continues. A state passes its current block. Calls run in order, and each piece is offered
        when saved. The engine may reuse the blocks when the result is there.

        Raises `GeometryError` for ids that are not unsigned 32-bit integers. The result raises
        `GeometryError` for blocks that do not fit the tokens, and errors of the engine's copy
        function. It raises `ClosedError` after the end or `seal`, `RequestRefused` for an ended
        offer.
        """
        return self._host.link.runner.start(partial(self._save, num_tokens, tables_of(block_ids)))

    def seal(self) -> Completion[None]:
        """Report that all is saved; the result raises `GeometryError` otherwise."""
        return self._host.link.runner.start(self._seal)

    def withdraw(self) -> Completion[None]:
        """End the offer, because its request was aborted."""
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
        """Release the host blocks at the end of the offer or of its copy, whichever is later."""
        if not self._is_copying:
            self._host.pool.release(self._blocks.host_tables)
