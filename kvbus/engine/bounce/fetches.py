"""Fetches into host blocks, and loads into the decode engine's blocks as tokens arrive."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

import anyio
import numpy as np
from msgspec.structs import replace

from kvbus.engine.bounce.copies import Copier, Direction, RequestBlocks
from kvbus.engine.bounce.pool import PIECE_BYTES, HostPool, HostTables, piece_tokens
from kvbus.engine.fetches import Fetch, FetchOptions, fetch_tables
from kvbus.engine.later import Completion, EndedQueue, Handle
from kvbus.engine.link import Link
from kvbus.engine.offers import BlockIds
from kvbus.errors import ClosedError, ErrorCode, FetchFailed, KVBusError
from kvbus.geometry import BlockTable
from kvbus.planning import Spans, asked_states, tail_spans
from kvbus.protocol.engine import Fetched

log = logging.getLogger("kvbus.engine")


class HostDecode:
    """The fetches of one decode engine through host blocks; all end with the link.

    Loads are about ``piece_bytes``, to overlap with transfers. A fetch waits up to ``wait_s`` for
    host blocks.
    """

    def __init__(
        self,
        link: Link,
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
        wait_s: float = 30.0,
    ) -> None:
        self.link, self.pool, self.copier, self.wait_s = link, pool, copier, wait_s
        self._chunk_tokens = piece_tokens(link.engine, piece_bytes=piece_bytes)
        self._over: EndedQueue[HostFetch] = EndedQueue()

    def ended(self) -> "list[HostFetch]":
        return self._over.take()

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        **options: Unpack[FetchOptions],
    ) -> "HostFetch":
        """Fetch tokens as `Link.fetch` does, into the engine's own blocks.

        Slots before ``first_token`` and after the last token do not change, unless ``zero_tail``
        zeroes the latter. ``timeout_s`` starts when host blocks are available. Raises
        `GeometryError` for blocks that do not fit the tokens, and `ClosedError`. A request larger
        than the host buffer fails.
        """
        engine, first_token = self.link.engine, options.get("first_token", 0)
        spans = {group.name: group.positions(first_token, num_tokens) for group in engine.groups}
        tables = fetch_tables(engine, block_ids, first_token, num_tokens)
        spans |= dict.fromkeys(asked_states(engine.groups, tables), (0, 1))
        for group in engine.groups:
            table = tables.get(group.name, BlockTable.of(()))
            table.check_covers(*spans[group.name], group.block_size)
        tails = tail_spans(engine.groups, spans) if options.get("zero_tail") else {}
        loaded = {name: (span[0], tails.get(name, span)[1]) for name, span in spans.items()}
        asked = options | {"chunk_tokens": self._chunk_tokens}
        ask = partial(self.link.fetch, ticket, num_tokens=num_tokens, **asked)
        fetch = HostFetch(self, ask, loaded, tables)
        fetch.ended.then(partial(self._over.note, fetch))
        self.link.runner.start(fetch.run)
        return fetch


class HostFetch(Handle):
    """A fetch of a decode engine through host blocks.

    ``ended`` has the result when valid KV is in the engine's blocks; it raises `FetchFailed`. No
    writer remains then, so ``freed`` comes with it. Stage ``requested`` with code ``busy`` means no
    host blocks in time; stage ``loading``, an error of the engine's copy function (its cause).
    ``fetch_id`` is the agent's; empty during the wait for host blocks.
    """

    _waits: anyio.CancelScope
    """For host blocks, from the start of `run`."""

    def __init__(
        self,
        host: HostDecode,
        ask: Callable[..., Fetch],
        spans: Spans,
        device_tables: Mapping[str, BlockTable],
    ) -> None:
        self.ended: Completion[Fetched] = Completion(host.link.runner)
        self.freed: Completion[None] = Completion(host.link.runner)
        self._host, self._ask = host, ask
        self._spans, self._device_tables = spans, device_tables
        self._loaded = {name: start for name, (start, _) in spans.items()}
        self._num_landed, self._changed = 0, anyio.Event()
        self._fetch: Fetch | None = None

    @property
    def fetch_id(self) -> str:
        return self._fetch.fetch_id if self._fetch is not None else ""

    def cancel(self, *, release_offer: bool = False) -> Completion[None]:
        """Cancel: `ended` raises with code ``cancelled``, unless the KV is confirmed by then.

        A running load completes first. ``release_offer``: see `Fetch.cancel`; it needs host blocks.
        """
        return self._host.link.runner.start(partial(self._cancel, release_offer))

    async def _cancel(self, release_offer: bool) -> None:
        self._waits.cancel()
        if self._fetch is not None:
            await self._fetch.cancel(release_offer=release_offer)

    async def run(self) -> None:
        try:
            self._end(await self._run())
        except FetchFailed as error:
            self._end(error)
        except KVBusError as error:
            self._end(_failed(error.message, error.code, stage="requested"))
        finally:
            self._end(_failed("the link was closed", ErrorCode.CLOSED))

    async def _run(self) -> Fetched:
        pool = self._host.pool
        wanted = {name: len(table) for name, table in self._device_tables.items()}
        tables: HostTables = {}
        with anyio.CancelScope() as self._waits:
            tables = await pool.acquire(wanted, wait_s=self._host.wait_s)
        try:
            if self._waits.cancel_called:
                message, code = "the engine cancelled the fetch", ErrorCode.CANCELLED
                raise _failed(message, code, stage="requested")
            fetch = self._fetch = self._ask(block_ids=tables, on_landed=self._on_landed)
        except BaseException:
            pool.release(tables)
            raise
        fetch.ended.add_callback(self._wake)
        try:
            return await self._follow(fetch, tables)
        finally:  # no more loads from there, but the agent may still write
            fetch.freed.then(partial(self._release, fetch.freed, tables))

    def _release(self, freed: Completion[None], tables: HostTables) -> None:
        doubt = freed.exception()
        if doubt is None:
            self._host.pool.release(tables)
        elif not isinstance(doubt, ClosedError):  # the host buffer ends with the link
            log.warning(
                "kvbus: fetch %s: its %d host blocks are lost until the engine restarts, as the "
                "agent may still write into them: %s",
                self.fetch_id,
                sum(map(np.size, tables.values())),
                doubt,
            )

    def _on_landed(self, num_tokens: int) -> None:
        self._num_landed = num_tokens
        self._wake()

    def _wake(self) -> None:
        self._changed.set()

    async def _follow(self, fetch: Fetch, tables: HostTables) -> Fetched:
        blocks = RequestBlocks(self._host.link.engine, tables, self._device_tables)
        while fetch.notice is None:
            await self._load(blocks, self._num_landed)
            await self._changed.wait()
            self._changed = anyio.Event()
        try:
            fetched = await fetch.ended
        except FetchFailed as error:  # the agent writes into host blocks only
            raise _failed(error.message, error.code, error.stage, fetch.fetch_id) from error
        await self._load(blocks, None)
        return replace(fetched, whole_blocks=False)  # slots before a window are not loaded

    async def _load(self, blocks: RequestBlocks, num_landed: int | None) -> None:
        """Load whole blocks up to ``num_landed``; with None, load everything."""
        spans = {}
        for group in blocks.engine.groups:
            start, stop = self._loaded[group.name], self._spans[group.name][1]
            if num_landed is not None:
                size = group.block_size
                stop = 0 if group.state else min(stop, num_landed) // size * size
            if start < stop:
                spans[group.name] = start, stop
                self._loaded[group.name] = stop
        if not spans:
            return
        try:
            with anyio.CancelScope(shield=True):
                await self._host.copier(Direction.LOAD, blocks.copies(spans))
        except Exception as error:  # any error of the engine
            self.cancel()
            message = f"the engine's copy function failed: {error}"
            raise _failed(message, ErrorCode.TRANSFER_FAILED, "loading", self.fetch_id) from error

    def _end(self, outcome: Fetched | FetchFailed) -> None:
        self.freed.settle(None)
        self.ended.settle(outcome)


def _failed(message: str, code: ErrorCode, stage: str = "lost", fetch_id: str = "") -> FetchFailed:
    return FetchFailed(message, code=code, stage=stage, blocks_free=True, fetch_id=fetch_id)
