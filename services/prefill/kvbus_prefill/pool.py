"""Pools: host memory of the agent for parked offers, which readers read as an engine's."""

import resource
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import anyio
import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvbus.agent.data_plane import has_rdma
from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.loop import in_thread
from kvbus.agent.segments import RegisteredRank, Segments
from kvbus.agent.service import Agent
from kvbus.data import messages as wire
from kvbus.data.client import Defined
from kvbus.errors import ConfigError
from kvbus.geometry import (
    NO_BLOCKS,
    BlockTable,
    EngineSpec,
    GroupSpec,
    ResizedRanks,
    Space,
    num_blocks_for,
    resize_ranks,
)
from kvbus.memory.memory_limits import available_bytes
from kvbus.memory.segment import new_memory_file
from kvbus.planning import Share
from kvbus.protocol.attach import PassSegment
from kvbus.protocol.commit_cell import CELLS_BYTES, CellNames, CommitCell
from kvbus.protocol.ticket import Ticket, packed_tables, pooled_ticket
from kvbus.protocol.tools import PoolStatus
from kvbus_prefill.offer.entry import OfferEntry
from kvbus_prefill.offer.events import Pooled

Ids = npt.NDArray[np.uint32]


class FreeBlocks:
    """A stack of block ids: blocks that were freed together are used together again."""

    def __init__(self, num_blocks: int) -> None:
        self._ids: Ids = np.arange(num_blocks, dtype=np.uint32)[::-1].copy()
        self.number = num_blocks

    def take(self, number: int) -> Ids:
        self.number -= number
        return self._ids[self.number : self.number + number][::-1].copy()

    def free(self, ids: Ids) -> None:
        self._ids[self.number : self.number + len(ids)] = ids[::-1]
        self.number += len(ids)


class Pool:
    """The pool of one engine; it outlives the engine while it holds offers."""

    def __init__(
        self,
        agent: Agent,
        engine: LocalEngine,
        local: LocalEngine,
        spaces: tuple[Space, ...],
        ticket_blocks: int,
    ) -> None:
        self.engine: LocalEngine | None = engine
        self.local, self.engine_id = local, engine.engine_id
        self.num_taken = self.used_bytes = 0
        self._agent, self._shape = agent, _shape_of(engine)
        self._ticket_blocks = ticket_blocks
        self._cells = CellNames(local.cells.swap) if local.cells is not None else None
        self._free = {space: FreeBlocks(space.num_blocks) for space in spaces}
        self._plan = self._plan_from(engine)

    def fits(self, engine: LocalEngine) -> bool:
        return self._shape == _shape_of(engine)

    def attach(self, engine: LocalEngine) -> None:
        self.engine, self._plan = engine, self._plan_from(engine)

    def detach(self) -> None:
        self.engine = None
        self._agent.data.remove(self._plan)

    @property
    def segments(self) -> Segments:
        return next(iter(self.local.ranks.values())).segments

    @property
    def size_bytes(self) -> int:
        held = self.local.ranks.values()
        return sum(one.size_bytes for rank in held for one in rank.rank.segments)

    def status(self) -> PoolStatus:
        return PoolStatus(
            engine_id=self.engine_id,
            engine_instance=self.local.instance,
            size_bytes=self.size_bytes,
            used_bytes=self.used_bytes,
            num_offers=self.num_taken,
            is_attached=self.engine is not None,
        )

    def take(self, offer: OfferEntry) -> Pooled | None:
        """Return blocks for the offer, or None without room."""
        tables = _needed(self.local.spec, offer)
        numbers = {space: sum(len(tables[one]) for one in space.groups) for space in self._free}
        if any(number > self._free[space].number for space, number in numbers.items()):
            return None
        pooled: dict[str, BlockTable] = {}
        for space, number in numbers.items():
            ids = self._free[space].take(number)
            for group in space.groups:
                some, ids = np.split(ids, [len(tables[group])])
                pooled[group] = BlockTable.of(some, first_block=tables[group].first_block)
        num_bytes = sum(space.block_bytes * number for space, number in numbers.items())
        self.num_taken, self.used_bytes = self.num_taken + 1, self.used_bytes + num_bytes
        blocks = packed_tables(pooled, max_blocks=self._ticket_blocks)
        return Pooled(
            self.local.engine_id,
            self.local.instance,
            pooled,
            num_bytes,
            self,
            blocks=blocks,
            cell=self._cells.open() if self._cells and blocks and offer.readers == 1 else 0,
        )

    def commit_cell(self, ticket: Ticket | None, pooled: Pooled) -> CommitCell | None:
        """Return the cell of a parked offer, if a reader may commit by one."""
        cells = self.local.cells
        if ticket is None or cells is None or not pooled.cell:
            return None
        return CommitCell(cells.swap, pooled_ticket(ticket, **pooled.names))

    def close_cells(self) -> None:
        if self.local.cells is not None:
            self.local.cells.close()

    def free(self, pooled: Pooled) -> None:
        if self._cells is not None and pooled.cell:
            self._cells.close(pooled.cell)
        for space, blocks in self._free.items():
            blocks.free(np.concatenate([pooled.tables[one].array() for one in space.groups]))
        self.num_taken, self.used_bytes = self.num_taken - 1, self.used_bytes - pooled.num_bytes

    def copy_job(self, offer: OfferEntry, pooled: Pooled) -> tuple[wire.Copy, Defined]:
        copy = wire.Copy(
            plan=self._plan.number,
            source_tables=offer.tables,
            target_tables=pooled.tables,
            spans=dict(_spans(self.local.spec, offer)),
            turn=wire.Turn(f"park {offer.offer_id}"),
        )
        return copy, self._plan

    def _plan_from(self, engine: LocalEngine) -> Defined:
        data, there, here = self._agent.data, engine.ranks, self.local.ranks
        number = data.new_number()
        add = wire.AddPlan(
            plan=number,
            sources={rank: memory.number for rank, memory in there.items()},
            targets={rank: memory.number for rank, memory in here.items()},
            shares=tuple(_shares(engine)),
            groups=tuple(group.name for group in engine.spec.groups),
        )
        needs = tuple(memory.defined for memory in (*there.values(), *here.values()))
        return Defined(add, wire.RemovePlan(plan=number), needs)


async def open_pool(
    agent: Agent, engine: LocalEngine, max_bytes: int, *, ticket_blocks: int
) -> Pool:
    """Allocate the pool of an engine. Takes seconds. Raises `KVBusError`."""
    ranks = [memory.rank for memory in engine.ranks.values()]
    resized = resize_ranks(engine.spec, ranks, max_bytes)
    spec = structs.replace(engine.spec, engine_id=f"parked-{uuid.uuid4().hex}")
    segments = agent.engines.new_segments(on_cut=lambda _: None)
    try:
        memories = await _register(agent, engine, spec, segments, resized)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await segments.discard()
        segments.remove()
        raise
    local = LocalEngine.new_pool(spec, memories)
    return Pool(agent, engine, local, resized.spaces, ticket_blocks)


async def _register(
    agent: Agent, engine: LocalEngine, spec: EngineSpec, segments: Segments, resized: ResizedRanks
) -> list[RegisteredRank]:
    memories: list[RegisteredRank] = []
    page = PassSegment("cells", CELLS_BYTES, kind="cells")
    await segments.take(page, [new_memory_file("kvbus-cells", CELLS_BYTES, huge_pages=False)])
    for rank in resized.ranks:
        (segment,) = rank.segments
        create = partial(new_memory_file, "kvbus-pool", segment.size_bytes, huge_pages="advise")
        passed = PassSegment(segment.segment_id, segment.size_bytes, direct=not agent.staging.only)
        await segments.take(passed, [await in_thread(create)])
        device = engine.ranks[rank.rank].device
        readers = (device,) if device != wire.HOST else ()
        memories.append(await segments.register(spec, rank, readers=readers))
    return memories


def check_pool_fits(agent: Agent, size_bytes: int) -> None:
    """Raise `ConfigError` for a pool that is larger than memory, or than what NIXL may pin."""
    room_bytes = available_bytes()
    if size_bytes > room_bytes:
        raise ConfigError(
            f"key 'park_bytes': {size_bytes} bytes do not fit, {room_bytes} bytes of memory are "
            f"available: set it to {room_bytes} at most",
            key="park_bytes",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    may_pin = soft == resource.RLIM_INFINITY or size_bytes <= soft
    if not may_pin and has_rdma(agent.data_plane.interfaces):
        raise ConfigError(
            f"key 'park_bytes': NIXL cannot pin {size_bytes} bytes for RDMA: set it to {soft} at "
            "most, or raise the limit (ulimit -l, or LimitMEMLOCK of systemd)",
            key="park_bytes",
        )


def _shape_of(engine: LocalEngine) -> tuple[object, ...]:
    ranks = engine.ranks.values()
    return engine.spec, tuple((memory.rank, memory.device) for memory in ranks)


def _shares(engine: LocalEngine) -> Iterator[Share]:
    for number, memory in engine.ranks.items():
        for region in memory.rank.regions:
            yield replace(Share.whole(region), holder=number, reader=number)


def _needed(spec: EngineSpec, offer: OfferEntry) -> dict[str, BlockTable]:
    """Return the offer's tables without blocks behind its last token."""
    return {group.name: _needed_of(group, offer) for group in spec.groups}


def _needed_of(group: GroupSpec, offer: OfferEntry) -> BlockTable:
    table = offer.tables.get(group.name, NO_BLOCKS)
    if group.state:
        return table
    end = num_blocks_for(offer.num_tokens, group.block_size)
    number = min(len(table), max(0, end - table.first_block))
    return BlockTable(table.ids[: 4 * number], table.first_block)


def _spans(spec: EngineSpec, offer: OfferEntry) -> Iterator[tuple[str, tuple[int, int]]]:
    for group in spec.groups:
        table = _needed_of(group, offer)
        start = table.first_block * group.block_size
        stop = start + len(table) * group.block_size
        yield group.name, (start, stop if group.state else max(start, min(stop, offer.num_tokens)))
