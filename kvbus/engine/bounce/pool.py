"""The host blocks of an engine, and a first-come, first-served queue for them."""

from bisect import bisect
from collections.abc import Iterable, Mapping
from math import lcm

import anyio
import numpy as np

from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import EngineSpec, KvLayout, lay_out_rank
from kvbus.geometry.blocks import BlockIds
from kvbus.planning import position_bytes

HOST_LAYOUT = KvLayout.parse("block,layer,kv,token,head,dim")
"""A block of all layers is contiguous."""

PIECE_BYTES = 32 << 20
"""Size of a copy, to overlap with transfers."""


HostTables = Mapping[str, BlockIds]
"""By group, in order of position."""


class HostPool:
    """All host blocks, the same on every rank.

    A request acquires all its blocks in one step, so that two requests cannot deadlock.
    """

    def __init__(self, num_blocks: Mapping[str, int], *, max_waiting: int = 256) -> None:
        self.num_blocks = dict(num_blocks)
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._free = {group: BlockAllocator(number) for group, number in num_blocks.items()}
        self._turn = anyio.Lock()
        self._released = anyio.Event()

    @property
    def num_held(self) -> int:
        return sum(one.num_blocks - one.num_free for one in self._free.values())

    async def acquire(self, wanted: Mapping[str, int], *, wait_s: float = 0.0) -> HostTables:
        """Acquire blocks by group; wait up to ``wait_s`` for releases.

        Raises `GeometryError` when the pool is too small, and `LocalError` (``busy``).
        """
        for group, number in wanted.items():
            if number > (there := self.num_blocks.get(group, 0)):
                raise GeometryError(
                    f"the request needs {number} host blocks of group '{group}', there are only "
                    f"{there}: make the host buffer larger",
                    needed=number,
                    num_blocks=there,
                )
        if not any(wanted.values()) or (not self.num_waiting and self._has(wanted)):
            return self._acquire(wanted)
        if wait_s <= 0 or self.num_waiting >= self._max_waiting:
            raise self._busy(wanted)
        self.num_waiting += 1
        try:
            with anyio.move_on_after(wait_s):
                async with self._turn:
                    while not self._has(wanted):
                        await self._released.wait()
                    return self._acquire(wanted)
        finally:
            self.num_waiting -= 1
        raise self._busy(wanted)

    def release(self, tables: HostTables) -> None:
        for group, ids in tables.items():
            self._free[group].release(ids)
        self._released.set()
        self._released = anyio.Event()

    async def all_free(self) -> None:
        while self.num_held:
            await self._released.wait()

    def _acquire(self, wanted: Mapping[str, int]) -> HostTables:
        return {group: self._free[group].acquire(number) for group, number in wanted.items()}

    def _has(self, wanted: Mapping[str, int]) -> bool:
        return all(self._free[group].num_free >= number for group, number in wanted.items())

    def _busy(self, wanted: Mapping[str, int]) -> LocalError:
        free = ", ".join(f"{self._free[group].num_free} of group '{group}'" for group in wanted)
        return LocalError(
            f"the host buffer is full: {dict(wanted)} blocks are wanted, free are {free}, and "
            f"{self.num_waiting} requests wait",
            code=ErrorCode.BUSY,
            num_waiting=self.num_waiting,
        )


class BlockAllocator:
    """Allocator of ids 0 to ``num_blocks`` - 1, from the shortest free run that is long enough.

    Without one, it joins the longest runs, as consecutive blocks are copied together.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._is_free = np.ones(num_blocks, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        return int(np.count_nonzero(self._is_free))

    def acquire(self, num_blocks: int) -> BlockIds:
        """Acquire ids; raises `LocalError` when fewer are free."""
        if not 0 <= num_blocks <= self.num_free:
            raise LocalError(f"{num_blocks} blocks of {self.num_free} free ones")
        runs = [np.empty(0, dtype=np.uint32)]
        while (left := num_blocks - sum(map(len, runs))) > 0:
            runs.append(self._acquire_run(left))
        return np.concatenate(runs)

    def release(self, ids: Iterable[int]) -> None:
        """Free ids; raises `LocalError`, and frees none, if one was free."""
        given = np.fromiter(ids, dtype=np.int64)
        if (
            np.any((given < 0) | (given >= self.num_blocks))
            or len(np.unique(given)) < len(given)
            or np.any(self._is_free[given])
        ):
            raise LocalError(f"of blocks {given.tolist()} some are free, or do not exist")
        self._is_free[given] = True

    def _acquire_run(self, at_most: int) -> BlockIds:
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        enough = np.flatnonzero(lengths >= at_most)
        best = enough[lengths[enough].argmin()] if enough.size else lengths.argmax()
        start, stop = starts[best], starts[best] + min(lengths[best], at_most)
        self._is_free[start:stop] = False
        return np.arange(start, stop, dtype=np.uint32)


def host_blocks(engine: EngineSpec, *, buffer_bytes: int, num_states: int = 16) -> dict[str, int]:
    """Return blocks by group, so that every rank's buffer fits in ``buffer_bytes``.

    Groups get the same number of tokens. States get ``num_states`` blocks, one for each request in
    the buffer. Raises `GeometryError`.
    """

    def blocks(num_tokens: int) -> dict[str, int]:
        return {
            group.name: num_states if group.state else num_tokens // group.block_size
            for group in engine.groups
        }

    def size_bytes(num_blocks: int | dict[str, int]) -> int:
        ranks = (
            lay_out_rank(engine, rank, HOST_LAYOUT, num_blocks=num_blocks)
            for rank in range(engine.num_ranks)
        )
        return max(rank.segments[0].size_bytes for rank in ranks)

    least = max(group.block_size for group in engine.groups)
    sizes = range(least, max(least, buffer_bytes) + 1)  # a token has at least one byte
    num_fitting = bisect(sizes, buffer_bytes, key=lambda num_tokens: size_bytes(blocks(num_tokens)))
    num_blocks = blocks(sizes[num_fitting - 1])
    if not num_fitting or min(num_blocks.values()) < 1:
        raise GeometryError(
            f"a host buffer of {buffer_bytes} bytes does not hold one block of every group of "
            f"engine '{engine.engine_id}': these take {size_bytes(1)}",
            buffer_bytes=buffer_bytes,
        )
    return num_blocks


def piece_tokens(engine: EngineSpec, *, piece_bytes: int) -> int:
    """Return the tokens in about ``piece_bytes`` over all ranks, replicas included.

    They fill whole blocks of every group; 0 when all groups are states.
    """
    sizes = [group.block_size for group in engine.groups if not group.state]
    if not sizes:
        return 0
    token_bytes = sum(
        position_bytes(region, engine.group(region.group))
        for rank in range(engine.num_ranks)
        for region in lay_out_rank(engine, rank, HOST_LAYOUT, num_blocks=1).regions
        if not engine.group(region.group).state
    )
    whole = lcm(*sizes)
    return max(1, piece_bytes // token_bytes // whole) * whole
