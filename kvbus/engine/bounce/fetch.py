"""One fetch of an engine that goes through host blocks: room, the agent's fetch, and the loads.

Refuses to report an end while a load of it still writes into the engine's blocks.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio

from kvbus.engine.bounce.buffer import Direction
from kvbus.engine.bounce.copier import Copier
from kvbus.engine.bounce.host_pool import HostPool, HostTables
from kvbus.engine.bounce.request_blocks import RequestBlocks
from kvbus.engine.fetch import Fetch, OnLanded
from kvbus.engine.latch import Latch
from kvbus.errors import ErrorCode, FetchFailed, KVBusError
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.planning import Spans
from kvbus.protocol.engine import Fetched

FetchInto = Callable[[HostTables, OnLanded], Fetch]
"""Asks the agent for a fetch into these host blocks; the other is told what has landed."""


@dataclass(frozen=True, slots=True)
class LoadPath:
    """What all fetches of an engine go through: host blocks, and who copies from there."""

    engine: EngineSpec
    pool: HostPool
    copier: Copier
    wait_s: float


class HostFetch:
    """One fetch of this engine; ``fetch_id`` is the agent's, empty while there is no room."""

    def __init__(
        self,
        path: LoadPath,
        start: FetchInto,
        spans: Spans,
        device_tables: Mapping[str, BlockTable],
    ) -> None:
        """``spans`` are the positions of each group that are loaded in the end."""
        self._path, self._start_fetch = path, start
        self._spans, self._device_tables = spans, device_tables
        self._loaded = {name: start for name, (start, _) in spans.items()}
        self._progress = _Progress()
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

    async def cancel(self) -> None:
        """Give up; `completed` raises with code ``cancelled``, unless the KV is confirmed by then.

        What is being loaded is loaded first.
        """
        self._waiting.cancel()
        if self._fetch is not None:
            with contextlib.suppress(KVBusError):  # the session is lost, and so is the fetch
                await self._fetch.cancel()

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
        pool = self._path.pool
        wanted = {name: len(table) for name, table in self._device_tables.items()}
        tables: HostTables = {}
        with self._waiting:
            tables = await pool.acquire(wanted, wait_s=self._path.wait_s)
        try:
            fetch = self._start(tables)
        except BaseException:
            pool.release(tables)
            raise
        in_use = _BlocksInUse(pool, tables)
        fetch.when_freed(in_use.end_use)
        try:
            return await self._follow(fetch, tables)
        finally:
            in_use.end_use()

    def _start(self, tables: HostTables) -> Fetch:
        if self._waiting.cancel_called:
            raise _failed("the engine cancelled the fetch", ErrorCode.CANCELLED, stage="requested")
        fetch = self._fetch = self._start_fetch(tables, self._progress.land)
        fetch.when_ended(self._progress.end)
        return fetch

    async def _follow(self, fetch: Fetch, tables: HostTables) -> Fetched:
        """Load what has landed while the rest does, and the rest once it is confirmed."""
        blocks = RequestBlocks(
            self._path.engine,
            firsts={name: table.first_block for name, table in self._device_tables.items()},
            host_tables=tables,
            device_tables=self._device_tables,
        )
        failure: FetchFailed | None = None
        while await self._progress.has_more():
            if failure is None:
                try:
                    await self._load(blocks, self._progress.num_tokens)
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
        return fetched

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
                await self._path.copier(Direction.LOAD, blocks.copies(spans))
        except Exception as error:  # the engine's own, of any kind
            message = f"the engine's copy function failed: {error}"
            code = ErrorCode.TRANSFER_FAILED
            raise _failed(message, code, stage="loading", fetch_id=self.fetch_id) from error

    def _end(self, outcome: Fetched | FetchFailed) -> None:
        """The first outcome counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._ended.set()


class _BlocksInUse:
    """Host blocks that the agent writes into, and that are loaded from: free after both."""

    def __init__(self, pool: HostPool, tables: HostTables) -> None:
        self._pool, self._tables = pool, tables
        self._num_uses = 2

    def end_use(self) -> None:
        """One of the two is done with them."""
        self._num_uses -= 1
        if not self._num_uses:
            self._pool.release(self._tables)


class _Progress:
    """How far an agent's fetch has landed, and whether it has ended."""

    def __init__(self) -> None:
        self.num_tokens, self._has_ended = 0, False
        self._changed = anyio.Event()

    def land(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._changed.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()

    async def has_more(self) -> bool:
        """Wait for a change; False when the fetch has ended."""
        await self._changed.wait()
        self._changed = anyio.Event()
        return not self._has_ended


def _failed(
    message: str, code: ErrorCode, *, stage: str = "lost", fetch_id: str = ""
) -> FetchFailed:
    return FetchFailed(message, code=code, stage=stage, blocks_free=True, fetch_id=fetch_id)
