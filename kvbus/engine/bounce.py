"""Host buffers: for engines whose KV cache no other process can map.

prefill   acquire host blocks ─▶ offer ─▶ save, save … ─▶ seal ─▶ release
decode    acquire host blocks ─▶ fetch ─▶ load ─▶ release
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Self, Unpack

import anyio
import msgspec
import numpy as np
import torch

from kvbus.engine.handles import Fetch
from kvbus.engine.later import Completion, EndedQueue, Handle
from kvbus.engine.link import Link
from kvbus.engine.messages import (
    BlockIds,
    FetchOptions,
    OfferOptions,
    check_groups,
    fetch_tables,
    tables_of,
)
from kvbus.engine.rank_memory import RankMemory, region_tensor
from kvbus.errors import ClosedError, ErrorCode, FetchFailed, GeometryError, KVBusError, LocalError
from kvbus.geometry import BlockTable, EngineSpec, GroupSpec, KvLayout, num_blocks_for
from kvbus.geometry.blocks import BlockIds as Ids
from kvbus.protocol.engine import Fetched

HOST_LAYOUT = KvLayout.parse("block,layer,kv,token,head,dim")  # blocks are contiguous

log = logging.getLogger("kvbus.engine")


class HostPool:
    """Host blocks by group, the same on every rank.

    A request acquires all its blocks at once, so that two requests cannot deadlock.
    """

    def __init__(self, num_blocks: Mapping[str, int]) -> None:
        self.num_blocks = dict(num_blocks)
        self._is_free = {group: np.ones(n, dtype=np.bool_) for group, n in num_blocks.items()}
        self._turn, self._released = asyncio.Lock(), anyio.Event()

    @property
    def num_free(self) -> dict[str, int]:
        return {group: int(np.count_nonzero(free)) for group, free in self._is_free.items()}

    @property
    def num_held(self) -> int:
        return sum(self.num_blocks.values()) - sum(self.num_free.values())

    async def acquire(self, wanted: Mapping[str, int], *, wait_s: float = 0.0) -> dict[str, Ids]:
        """Return the ids of free blocks, by group, as soon as all are free.

        Raises `GeometryError` if the pool is too small, and ``busy`` after ``wait_s``.
        """
        if any(number > self.num_blocks.get(group, 0) for group, number in wanted.items()):
            message = f"{wanted} host blocks are wanted, there are only {self.num_blocks}"
            raise GeometryError(f"{message}: make the host buffer larger")
        with anyio.move_on_after(wait_s):
            async with self._turn:
                while any(self.num_free[group] < number for group, number in wanted.items()):
                    await self._released.wait()
                return {group: self._take(group, number) for group, number in wanted.items()}
        message = f"the host buffer is full: {wanted} blocks are wanted, {self.num_free} are free"
        raise LocalError(message, code=ErrorCode.BUSY)

    def release(self, tables: Mapping[str, Ids]) -> None:
        for group, ids in tables.items():
            if self._is_free[group][ids].any():
                raise LocalError(f"of blocks {ids.tolist()} of group '{group}' some are free")
            self._is_free[group][ids] = True
        self._released.set()
        self._released = anyio.Event()

    @contextmanager
    def released_on_error(self, tables: Mapping[str, Ids]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self.release, tables)
            yield
            stack.pop_all()

    async def all_free(self) -> None:
        while self.num_held:
            await self._released.wait()

    def _take(self, group: str, number: int) -> Ids:
        ids = np.flatnonzero(self._is_free[group])[:number].astype(np.uint32)
        self._is_free[group][ids] = False
        return ids


class Direction(StrEnum):
    """Direction of a copy: save to the host, or load to the device."""

    SAVE = "save"
    LOAD = "load"


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Copies of token slots ``slots[0]`` to ``slots[1]`` - 1 in each block of one group.

    Device block ``ids[i]`` (uint32) belongs to host block ``first_host_block + i``. The rank,
    layers and parts are set for a `CopyBlocks`.
    """

    group: str
    ids: Ids
    first_host_block: int
    slots: tuple[int, int]
    rank: int = 0
    layers: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()


CopyBlocks = Callable[[BlockCopy, torch.Tensor, Direction], None]
"""Function of the engine that copies between device blocks and a view of host blocks.

The view is [block, layer, part, token, head, dim], in the group's dtype; whole blocks are
contiguous. It runs in a thread, and returns when the copy is complete."""

Copier = Callable[[Direction, Sequence[BlockCopy]], Awaitable[None]]
"""Function that copies on every rank, and returns when all copies are complete; never cancelled."""


def block_copies(
    group: GroupSpec, device: BlockTable, host_ids: Ids, start: int, stop: int
) -> Iterator[BlockCopy]:
    """Cut positions into copies of one partial block, or of consecutive whole ones."""
    device_ids, size, first = device.array(), group.block_size, device.first_block
    start = max(start, first * size)
    while start < stop:
        block, slot = divmod(start, size)
        run = host_ids[block - first : max(block + 1, stop // size) - first]
        gaps = np.flatnonzero(np.diff(run) != 1)
        num_blocks = 1 if slot else int(gaps[0]) + 1 if gaps.size else len(run)
        end = min(stop, (block + num_blocks) * size)
        slots = slot, end - (block + num_blocks - 1) * size
        ids = device_ids[block - first : block - first + num_blocks]
        yield BlockCopy(group.name, ids, int(run[0]), slots)
        start = end


class HostBuffer:
    """The host blocks of one rank, for its `Link`; the device can pin ``tensor``.

    Raises `SegmentError`.
    """

    def __init__(self, engine: EngineSpec, rank: int, num_blocks: Mapping[str, int]) -> None:
        self.memory = RankMemory.allocate(engine, rank, HOST_LAYOUT, num_blocks=num_blocks)
        self.tensor, regions = self.memory.tensor, self.memory.rank.regions
        self._regions = [(one, region_tensor(engine, one, self.tensor)) for one in regions]

    def run(self, direction: Direction, copies: Iterable[BlockCopy], copy: CopyBlocks) -> None:
        """Call ``copy`` for the regions of this rank, in this thread."""
        rank = self.memory.rank.rank
        for one in copies:
            blocks = slice(one.first_host_block, one.first_host_block + len(one.ids))
            for region, tensor in self._regions:
                if region.group == one.group:
                    part = replace(one, rank=rank, layers=region.layers, parts=region.parts)
                    copy(part, tensor[blocks, :, :, slice(*one.slots)], direction)


class LocalCopier:
    """A `Copier` for ranks in this process, one copy at a time."""

    def __init__(self, buffers: Iterable[HostBuffer], copy: CopyBlocks) -> None:
        self._buffers, self._copy = tuple(buffers), copy
        self._limiter = anyio.CapacityLimiter(1)

    async def __call__(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        for buffer in self._buffers:
            run = partial(buffer.run, direction, copies, self._copy)
            await anyio.to_thread.run_sync(run, limiter=self._limiter)


class HostLink:
    """A `Link` through host blocks; requests fail with ``busy`` after ``wait_s`` without blocks.

    Calls return immediately, in any thread; copies run in other threads.
    """

    def __init__(self, link: Link, pool: HostPool, copier: Copier) -> None:
        self.link, self.pool, self.copier = link, pool, copier
        self._over: EndedQueue[HostFetch] = EndedQueue()

    def ended(self) -> "list[HostFetch]":
        """Return fetches that ended since the last call, as `Link.ended` does."""
        return self._over.take()

    def offer(
        self, request_id: str, *, num_tokens: int, wait_s: float = 0.0, **more: Unpack[OfferOptions]
    ) -> "Completion[HostOffer]":
        """Offer host blocks, with the options of `Link.offer` except ``sealed``; saves follow."""
        more |= {"sealed": False, "first_blocks": dict(more.get("first_blocks") or {})}
        offer = HostOffer(self, num_tokens)
        return self.link.runner.start(partial(offer.begin, request_id, wait_s, more))

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        wait_s: float = 30.0,
        **options: Unpack[FetchOptions],
    ) -> "HostFetch":
        """Fetch tokens into the engine's own blocks, as `Link.fetch` does.

        Other slots do not change, except with ``zero_tail``. ``timeout_s`` starts when host blocks
        are available.
        """
        fetch = HostFetch(self, num_tokens, block_ids, options)
        fetch.ended.then(partial(self._over.note, fetch))
        self.link.runner.start(partial(fetch.run, ticket, wait_s))
        return fetch


class HostOffer:
    """An offer from host blocks: `save` computed blocks and `seal`, or `withdraw`.

    After a failed `save`, only `withdraw` is possible. Host blocks are free at ``ended``, or after
    a copy that still runs then.
    """

    def __init__(self, host: HostLink, num_tokens: int) -> None:
        self.num_tokens, self.num_saved = num_tokens, 0
        self._engine, self._runner = host.link.engine, host.link.runner
        self._host, self._device = host, dict[str, BlockTable]()
        self._unsaved = {one.name for one in self._engine.groups if one.state and num_tokens}
        self._turn, self._is_saving, self._closed = asyncio.Lock(), False, ""

    async def begin(self, request_id: str, wait_s: float, options: OfferOptions) -> Self:
        firsts, wanted = options["first_blocks"] or {}, dict[str, int]()
        check_groups(self._engine, firsts)
        for group in self._engine.groups:
            last = min(1, self.num_tokens) if group.state else self.num_tokens
            end, first = num_blocks_for(last, group.block_size), firsts.get(group.name, 0)
            wanted[group.name] = max(0, end - first)
            self._device[group.name] = BlockTable(b"", first)
        self._tables = tables = await self._host.pool.acquire(wanted, wait_s=wait_s)
        with self._host.pool.released_on_error(tables):
            offer = self._host.link.offer(request_id, num_tokens=0, block_ids=tables, **options)
        self._offer, self.ended = offer, offer.ended
        self.ended.then(self._on_ended)
        await offer
        return self

    @property
    def offer_id(self) -> str:
        return self._offer.offer_id

    @property
    def ticket(self) -> dict[str, Any]:
        return self._offer.ticket

    def save(self, num_tokens: int, block_ids: BlockIds) -> Completion[None]:
        """Save the tokens since the last call; ``num_tokens`` counts all so far.

        ``block_ids`` lists the new blocks by group and position, and a state's block with the last
        tokens. The engine may reuse them once the result arrives. It raises `GeometryError`, errors
        of the copy function, and `ClosedError` after the end or `seal`.
        """
        return self._runner.start(partial(self._save, num_tokens, tables_of(block_ids)))

    def seal(self) -> Completion[None]:
        """Seal the offer; the result raises `GeometryError` if not all is saved."""
        return self._runner.start(self._seal)

    def withdraw(self) -> Completion[None]:
        self._close("it was withdrawn")
        return self._offer.withdraw()

    async def _save(self, num_tokens: int, given: Mapping[str, BlockTable]) -> None:
        async with self._turn:
            self._check_open()
            copies = self._add(num_tokens, given)
            self._is_saving = True
            try:
                with anyio.CancelScope(shield=True):
                    await self._host.copier(Direction.SAVE, copies)
                self._check_open()
                self.num_saved = num_tokens
                if num_tokens == self.num_tokens:
                    self._unsaved -= {name for name, table in given.items() if table}
                await self._offer.extend(num_tokens)
            except BaseException:
                self._close("a save of it did not end well")
                raise
            finally:
                self._is_saving = False
                if self.ended.done():
                    self._host.pool.release(self._tables)

    def _add(self, num_tokens: int, given: Mapping[str, BlockTable]) -> list[BlockCopy]:
        start, device, copies = self.num_saved, dict(self._device), list[BlockCopy]()
        if not start <= num_tokens <= self.num_tokens:
            message = f"num_tokens must be {start} to {self.num_tokens}, not {num_tokens}"
            raise GeometryError(message, field="num_tokens")
        check_groups(self._engine, given)
        for group in self._engine.groups:
            name, size, known = group.name, group.block_size, device[group.name]
            table, span = given.get(name, BlockTable(b"")), (start, num_tokens)
            if group.state:
                table.check_covers(0, min(len(table), 1), 1)
                span = 0, min(len(table), num_tokens)
            else:
                table = device[name] = BlockTable(known.ids + table.ids, known.first_block)
                table.check_covers(known.first_block * size, num_tokens, size)
            copies += block_copies(group, table, self._tables[name], *span)
        self._device = device
        return copies

    async def _seal(self) -> None:
        async with self._turn:
            self._check_open()
            if self.num_saved < self.num_tokens or self._unsaved:
                raise GeometryError(
                    f"save the rest first: {self.num_saved} of {self.num_tokens} tokens are saved, "
                    f"and not the states {sorted(self._unsaved)}"
                )
            self._close("it is sealed")
        await self._offer.seal()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"request '{self._offer.request_id}' is over: {self._closed}")

    def _close(self, why: str) -> None:
        self._closed = self._closed or why

    def _on_ended(self) -> None:
        self._close("its offer has ended")
        if not self._is_saving:
            self._host.pool.release(self._tables)


class HostFetch(Handle):
    """A fetch through host blocks.

    ``ended`` has the result when valid KV is in the engine's blocks, with ``freed``. Stage
    ``requested`` with code ``busy`` means no host blocks in time; stage ``loading``, an error of
    the copy function.
    """

    _waits: anyio.CancelScope  # for host blocks, from the start of `run`
    _fetch: Fetch | None

    def __init__(
        self, host: HostLink, num_tokens: int, block_ids: BlockIds, options: FetchOptions
    ) -> None:
        self.ended: Completion[Fetched] = Completion(host.link.runner)
        self.freed: Completion[None] = Completion(host.link.runner)
        self._host, self._options, self._fetch = host, options, None
        self._span = options.get("first_token", 0), num_tokens
        self._device = fetch_tables(host.link.engine, block_ids, *self._span)

    @property
    def fetch_id(self) -> str:
        return self._fetch.fetch_id if self._fetch is not None else ""

    def cancel(self, *, release_offer: bool = False) -> Completion[None]:
        return self._host.link.runner.start(partial(self._cancel, release_offer))

    async def _cancel(self, release_offer: bool) -> None:
        self._waits.cancel()
        if self._fetch is not None:
            await self._fetch.cancel(release_offer=release_offer)

    async def run(self, ticket: Mapping[str, Any], wait_s: float) -> None:
        ended: Fetched | FetchFailed = _failed("the link was closed", ErrorCode.CLOSED)
        try:
            ended = await self._run(ticket, wait_s)
        except FetchFailed as error:
            ended = error
        except KVBusError as error:
            ended = _failed(error.message, error.code, "requested")
        except (TypeError, ValueError) as error:  # an unknown option, or no ticket
            ended = _failed(str(error), ErrorCode.INVALID, "requested")
        finally:
            self.freed.settle(None)
            self.ended.settle(ended)

    async def _run(self, ticket: Mapping[str, Any], wait_s: float) -> Fetched:
        pool, tables = self._host.pool, dict[str, Ids]()
        wanted = {name: len(table) for name, table in self._device.items()}
        with anyio.CancelScope() as self._waits:
            tables = await pool.acquire(wanted, wait_s=wait_s)
        if self._waits.cancel_called:
            pool.release(tables)
            raise _failed("the engine cancelled the fetch", ErrorCode.CANCELLED, "requested")
        with pool.released_on_error(tables):
            fetch = self._fetch = self._host.link.fetch(
                ticket, num_tokens=self._span[1], block_ids=tables, **self._options
            )
        try:
            fetched = await fetch.ended
        except FetchFailed as error:  # the agent writes into host blocks only
            raise _failed(error.message, error.code, error.stage, fetch.fetch_id) from error
        else:
            await self._load(tables)
        finally:  # no load runs, but the agent may still write
            fetch.freed.then(partial(self._release, fetch.freed, tables))
        return msgspec.structs.replace(fetched, whole_blocks=False)  # no slots before a window

    async def _load(self, tables: Mapping[str, Ids]) -> None:
        copies = list[BlockCopy]()
        for name, table in self._device.items():
            group = self._host.link.engine.group(name)
            start, stop = (0, len(table)) if group.state else group.positions(*self._span)
            if self._options.get("zero_tail") and start < stop:
                stop = num_blocks_for(stop, group.block_size) * group.block_size
            copies += block_copies(group, table, tables[name], start, stop)
        try:
            with anyio.CancelScope(shield=True):
                await self._host.copier(Direction.LOAD, copies)
        except Exception as error:  # any error of the engine
            message, code = f"the engine's copy function failed: {error}", ErrorCode.TRANSFER_FAILED
            raise _failed(message, code, "loading", self.fetch_id) from error

    def _release(self, freed: Completion[None], tables: Mapping[str, Ids]) -> None:
        doubt = freed.exception()
        if doubt is None:
            self._host.pool.release(tables)
        elif not isinstance(doubt, ClosedError):  # the host buffer ends with the link
            message = "kvbus: fetch %s: its %d host blocks are lost until the engine restarts: %s"
            log.warning(message, self.fetch_id, sum(map(len, tables.values())), doubt)


def _failed(message: str, code: ErrorCode, stage: str = "lost", fetch_id: str = "") -> FetchFailed:
    return FetchFailed(message, code=code, stage=stage, blocks_free=True, fetch_id=fetch_id)
