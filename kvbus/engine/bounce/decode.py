"""Fetches KV into host blocks, and loads it into the decode engine's blocks as it arrives.

Refuses to call KV valid before the agent has confirmed it and all of it is loaded, and to give
host blocks to another request while the agent may still write into them.
"""

from collections.abc import Mapping
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from kvbus.engine.bounce.copier import Copier
from kvbus.engine.bounce.fetch import HostFetch, LoadPath
from kvbus.engine.bounce.host_pool import HostPool, HostTables
from kvbus.engine.bounce.request_blocks import check_groups
from kvbus.engine.bounce.sizing import PIECE_BYTES, piece_tokens
from kvbus.engine.decode import BlockIds, DecodeSession
from kvbus.engine.fetch import Fetch, OnLanded
from kvbus.errors import ClosedError
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.planning import Spans, whole_spans

CLOSE_TIMEOUT_S = 1.0


class HostDecode:
    """The fetches of one decode engine that goes through host blocks; open within ``async with``.

    About ``piece_bytes`` are loaded at a time, while what follows is on the wire. A fetch waits for
    room on the host for at most ``wait_s``. Leaving the block cancels what is left.
    """

    def __init__(
        self,
        session: DecodeSession,
        pool: HostPool,
        copier: Copier,
        *,
        piece_bytes: int = PIECE_BYTES,
        wait_s: float = 30.0,
    ) -> None:
        self.session = session
        self.path = LoadPath(session.engine, pool, copier, wait_s)
        self._piece_tokens = piece_tokens(session.engine, piece_bytes=piece_bytes)
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
    ) -> HostFetch:
        """Ask for tokens as `DecodeSession.fetch` does, into the engine's own blocks.

        The slots of a block in front of ``first_token`` are not touched, nor are those behind the
        last token, unless ``zero_tail`` asks for zeros. ``timeout_s`` counts from when there is
        room on the host. Raises `GeometryError` for blocks that do not fit the tokens and for a
        request that is larger than the host buffer, and `ClosedError`.
        """
        if self._tasks is None:
            raise ClosedError("the host decode is not open")
        engine = self.session.engine
        check_groups(engine, block_ids)
        spans = whole_spans(engine.groups, first_token, num_tokens)
        tables = _device_tables(engine, spans, block_ids)
        self.path.pool.check_fits({name: len(table) for name, table in tables.items()})

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
            )

        loaded = _with_tails(engine, spans) if zero_tail else spans
        fetch = HostFetch(self.path, start, loaded, tables)
        self._fetches.add(fetch)
        self._tasks.start_soon(self._run, fetch)
        return fetch

    async def _run(self, fetch: HostFetch) -> None:
        try:
            await fetch.run()
        finally:
            self._fetches.discard(fetch)


def _with_tails(engine: EngineSpec, spans: Spans) -> Spans:
    """With all slots of the last block, which the agent has zeroed."""
    sizes = {group.name: group.block_size for group in engine.groups}
    return {
        name: (start, -(-stop // sizes[name]) * sizes[name] if start < stop else stop)
        for name, (start, stop) in spans.items()
    }


def _device_tables(engine: EngineSpec, spans: Spans, block_ids: BlockIds) -> dict[str, BlockTable]:
    """Of every group exactly the blocks of its span; raises `GeometryError`."""
    tables = {}
    for group in engine.groups:
        start, stop = spans[group.name]
        ids = block_ids.get(group.name, ())
        table = BlockTable.of(ids, first_block=start // group.block_size)
        table.check_covers(start, stop, group.block_size)
        tables[group.name] = table
    return tables
