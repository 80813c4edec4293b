"""Fetches KV into host blocks, and loads it into the decode engine's blocks as it arrives.

Refuses to call KV valid before the agent has confirmed it and all of it is loaded, to report an end
while a load still writes into the engine's blocks, and to give host blocks to another request while
the agent may still write into them.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from kvbus.engine.bounce.buffer import Copier, Direction
from kvbus.engine.bounce.host_pool import HostPool, HostTables
from kvbus.engine.bounce.request_blocks import RequestBlocks
from kvbus.engine.bounce.sizing import PIECE_BYTES, piece_tokens
from kvbus.engine.decode import BlockIds, DecodeSession, fetch_tables
from kvbus.engine.fetch import Fetch, OnLanded
from kvbus.engine.session import Latch
from kvbus.errors import ClosedError, ErrorCode, FetchFailed, KVBusError
from kvbus.geometry import BlockTable
from kvbus.planning import Spans, tail_spans
from kvbus.protocol.engine import Fetched

CLOSE_TIMEOUT_S = 1.0

FetchInto = Callable[[HostTables, OnLanded], Fetch]
"""Asks the agent for a fetch into these host blocks; the other is told what has landed."""


class HostDecode:
    """The fetches of one decode engine that goes through host blocks; open within ``async with``.

    About ``piece_bytes`` are loaded at a time, while what follows is on the wire. A fetch waits for
    room on the host for at most ``wait_s``. ``on_ended`` is called with each fetch that ended.
    Leaving the block cancels what is left.
    """

    def __init__(
        self,
        session: DecodeSession,
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
        wait_s: float = 30.0,
        on_ended: Callable[["HostFetch"], None] | None = None,
    ) -> None:
        self.session, self.pool, self.copier, self.wait_s = session, pool, copier, wait_s
        self._piece_tokens = piece_tokens(session.engine, piece_bytes=piece_bytes)
        self._on_ended = on_ended
        self._tasks: TaskGroup | None = None
        self._fetches: set[HostFetch] = set()

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is left, and end; what is loaded is waited for. Idempotent."""
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            for fetch in list(self._fetches):
                await fetch.cancel()
            for fetch in list(self._fetches):
                await fetch.blocks_freed()
        tasks.cancel_scope.cancel()
        # told of no exception, it does not wrap the caller's into an ExceptionGroup
        await tasks.__aexit__(None, None, None)

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        first_token: int = 0,
        timeout_s: float | None = None,
        zero_tail: bool = False,
        fetch_id: str | None = None,
        priority: int = 0,
        traceparent: str = "",
    ) -> "HostFetch":
        """Ask for tokens as `DecodeSession.fetch` does, into the engine's own blocks.

        The slots of a block in front of ``first_token`` are not touched, nor are those behind the
        last token, unless ``zero_tail`` asks for zeros. ``timeout_s`` counts from when there is
        room on the host. ``fetch_id`` is one that the engine has never used before. Raises
        `GeometryError` for blocks that do not fit the tokens and for a request that is larger than
        the host buffer, and `ClosedError`.
        """
        if self._tasks is None:
            raise ClosedError("the host decode is not open")
        engine = self.session.engine
        spans = {group.name: group.positions(first_token, num_tokens) for group in engine.groups}
        tables = fetch_tables(engine, block_ids, first_token, num_tokens)
        for group in engine.groups:
            table = tables.get(group.name, BlockTable.of(()))
            table.check_covers(*spans[group.name], group.block_size)
        self.pool.check_fits({name: len(table) for name, table in tables.items()})
        tails = tail_spans(engine.groups, spans) if zero_tail else {}
        loaded = {name: (span[0], tails.get(name, span)[1]) for name, span in spans.items()}

        def start(host_tables: HostTables, on_landed: OnLanded) -> Fetch:
            return self.session.fetch(
                ticket,
                num_tokens=num_tokens,
                block_ids=host_tables,
                first_token=first_token,
                timeout_s=timeout_s,
                zero_tail=zero_tail,
                piece_tokens=self._piece_tokens,
                on_landed=on_landed,
                fetch_id=fetch_id,
                priority=priority,
                traceparent=traceparent,
            )

        fetch = HostFetch(self, start, loaded, tables)
        self._fetches.add(fetch)
        fetch.when_ended(lambda: self._fetches.discard(fetch))
        if self._on_ended is not None:
            fetch.when_ended(partial(self._on_ended, fetch))
        self._tasks.start_soon(fetch.run)
        return fetch


class HostFetch:
    """One fetch of this engine; ``fetch_id`` is the agent's, empty while there is no room."""

    def __init__(
        self,
        host: HostDecode,
        start: FetchInto,
        spans: Spans,
        device_tables: Mapping[str, BlockTable],
    ) -> None:
        """``spans`` are the positions of each group that are loaded in the end."""
        self._host, self._start_fetch = host, start
        self._spans, self._device_tables = spans, device_tables
        self._loaded = {name: start for name, (start, _) in spans.items()}
        self._num_landed, self._changed = 0, anyio.Event()
        self._fetch: Fetch | None = None
        self._ended = Latch()
        self._outcome: Fetched | FetchFailed | None = None
        self._waiting = anyio.CancelScope()

    @property
    def fetch_id(self) -> str:
        """As in the agent's log."""
        return self._fetch.fetch_id if self._fetch is not None else ""

    async def completed(self) -> Fetched:
        """The notice of success: the KV is in the engine's blocks, and valid.

        Raises `FetchFailed`; nothing writes into the blocks then. Stage ``requested`` and code
        ``busy`` mean that there was no room on the host in time, stage ``loading`` that the
        engine's copy function raised, which is the cause.
        """
        await self._ended.wait()
        if isinstance(self._outcome, Fetched):
            return self._outcome
        raise self._outcome or _failed("the fetch ended without an outcome", ErrorCode.INTERNAL)

    async def blocks_freed(self) -> None:
        """Return when nothing can write into the engine's blocks: when the fetch has ended."""
        await self._ended.wait()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when the fetch has ended; at once when it has by now."""
        self._ended.when_set(call)

    async def cancel(self, *, release_offer: bool = False) -> None:
        """Give up; `completed` raises with code ``cancelled``, unless the KV is confirmed by then.

        What is being loaded is loaded first. ``release_offer`` as of `Fetch.cancel`, once there was
        room to ask for it.
        """
        self._waiting.cancel()
        if self._fetch is not None:
            with contextlib.suppress(KVBusError):  # the session is lost, and so is the fetch
                await self._fetch.cancel(release_offer=release_offer)

    async def run(self) -> None:
        """Called by the host decode: from the wait for room to the end."""
        try:
            self._end(await self._run())
        except FetchFailed as error:
            self._end(error)
        except KVBusError as error:
            self._end(_failed(error.message, error.code, stage="requested"))
        except Exception as error:  # such as a ticket that is none: this fetch fails alone
            failure = _failed(f"the fetch cannot be asked for: {error}", ErrorCode.INVALID)
            failure.__cause__ = error
            self._end(failure)
        finally:
            self._end(_failed("the host decode was closed", ErrorCode.CLOSED))

    async def _run(self) -> Fetched:
        pool = self._host.pool
        wanted = {name: len(table) for name, table in self._device_tables.items()}
        tables: HostTables = {}
        with self._waiting:
            tables = await pool.acquire(wanted, wait_s=self._host.wait_s)
        try:
            fetch = self._start(tables)
        except BaseException:
            pool.release(tables)
            raise
        try:
            return await self._follow(fetch, tables)
        finally:  # nothing is loaded from there any more; the agent may still write there
            fetch.when_freed(partial(pool.release, tables))

    def _start(self, tables: HostTables) -> Fetch:
        if self._waiting.cancel_called:
            raise _failed("the engine cancelled the fetch", ErrorCode.CANCELLED, stage="requested")
        fetch = self._fetch = self._start_fetch(tables, self._on_landed)
        fetch.when_ended(self._wake)
        return fetch

    def _on_landed(self, num_tokens: int) -> None:
        self._num_landed = num_tokens
        self._wake()

    def _wake(self) -> None:
        self._changed.set()

    async def _follow(self, fetch: Fetch, tables: HostTables) -> Fetched:
        """Load what has landed while the rest does, and the rest once it is confirmed."""
        blocks = RequestBlocks(self._host.session.engine, tables, self._device_tables)
        failure: FetchFailed | None = None
        while fetch.notice is None:
            await self._changed.wait()
            self._changed = anyio.Event()
            if failure is None and fetch.notice is None:
                try:
                    await self._load(blocks, self._num_landed)
                except FetchFailed as error:
                    failure = error
                    await self.cancel()
        if failure is not None:
            raise failure
        try:
            fetched = await fetch.completed()
        except FetchFailed as error:  # the agent writes into host blocks only
            failure = _failed(error.message, error.code, stage=error.stage, fetch_id=fetch.fetch_id)
            raise failure from error
        await self._load(blocks, None)
        return replace(fetched, whole_blocks=False)  # what is in front of a window stays behind

    async def _load(self, blocks: RequestBlocks, num_landed: int | None) -> None:
        """Whole blocks of what has landed; with None all, as nothing more may land."""
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
        except Exception as error:  # the engine's own, of any kind
            message = f"the engine's copy function failed: {error}"
            code = ErrorCode.TRANSFER_FAILED
            raise _failed(message, code, stage="loading", fetch_id=self.fetch_id) from error

    def _end(self, outcome: Fetched | FetchFailed) -> None:
        """The first outcome counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._ended.set()


def _failed(
    message: str, code: ErrorCode, *, stage: str = "lost", fetch_id: str = ""
) -> FetchFailed:
    return FetchFailed(message, code=code, stage=stage, blocks_free=True, fetch_id=fetch_id)
