"""Transfers: tiles staged here, packed by the holder, zeroed here, or compared; waits for work."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import structlog

from kvbus.agent.segments import RegisteredRank
from kvbus.agent.staging_devices import DeviceSlots
from kvbus.data import messages as data
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, RemoteError
from kvbus.geometry import GroupSpec, Tile, slot_bytes
from kvbus.planning import Share, Span, chosen_tiles, piece_of
from kvbus.protocol import peer as wire
from kvbus.protocol.message import Empty
from kvbus_decode.chunk import Chunk
from kvbus_decode.read_table import (
    COMPARING,
    COPYING,
    ORDERING,
    PACKING,
    QUEUED,
    READING,
    TransferState,
)
from kvbus_decode.remote_agent import Source
from kvbus_decode.route import SourcePlan
from kvbus_decode.transfers import Stage, open_plan

log = structlog.get_logger()

UNPACK_TIMEOUT_S = 5.0

Digests = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False, kw_only=True)
class StagedWork:
    """READ of whole blocks into a slot, then a copy."""

    stages: ClassVar[tuple[TransferState, ...]] = (QUEUED, READING, COPYING)
    chunk: Chunk
    plan: SourcePlan
    index: int
    tile: Span
    slots: DeviceSlots

    def begin(self, stage: Stage) -> None:
        plan, slots, request = open_plan(self.plan.staged_plan), self.slots, self.chunk.request
        slot = _slot_of(stage)
        if stage.kind is READING:
            read = data.ReadStaged(
                plan=plan.number,
                index=self.index,
                source_tables=self.chunk.wanted.tables,
                tile=self.tile,
                device=slots.device,
                slot=slot,
                priority=request.priority,
            )
            stage.read(read, self.plan.source, plan, slots.defined)
        else:
            copy = data.CopyStaged(
                plan=plan.number,
                index=self.index,
                target_tables=request.tables,
                tile=self.tile,
                device=slots.device,
                slot=slot,
                turn=self.chunk.turn,
            )
            stage.start(copy, plan, slots.defined)


@dataclass(slots=True, eq=False, kw_only=True)
class PackedWork:
    stages: ClassVar[tuple[TransferState, ...]] = (PACKING, QUEUED, READING, COPYING)
    chunk: Chunk
    source: Source
    share: Share
    group: GroupSpec
    tile: Tile
    slots: DeviceSlots
    packed: wire.Packed | None = None

    def begin(self, stage: Stage) -> None:
        if stage.kind is PACKING:
            self._pack(stage)
        elif stage.kind is READING:
            self._read(stage)
        else:
            self._scatter(stage)

    def _pack(self, stage: Stage) -> None:
        chunk, context = self.chunk, stage.context
        message = wire.Pack(
            **self.source.named,
            offer_id=chunk.ticket.offer_id,
            epoch=chunk.wanted.epoch,
            rank=self.share.holder,
            tile=self.tile,
            table=chunk.blocks_of(self.tile),
            slot_lease_s=context.lease_s,
            token=chunk.wanted.token,
            done=stage.done,
            priority=chunk.request.priority,
        )
        left_s = chunk.time_left_s(context.agent.loop.time())
        self.source.request(message, left_s, partial(self._take_packed, stage))

    def _take_packed(self, stage: Stage, packed: wire.Packed | KVBusError) -> None:
        if isinstance(packed, KVBusError):
            stage.end(error=packed)
            return
        num_bytes = slot_bytes(self.group, self.tile)
        if packed.num_bytes != num_bytes:
            release_slots(self.source, (packed.slot_id,))
            message = f"the prefill agent packed {packed.num_bytes} bytes, the tile has {num_bytes}"
            stage.end(error=GeometryError(message))
            return
        self.packed = packed
        stage.end(slot_id=packed.slot_id, slot_lease_s=packed.slot_lease_s)

    def _read(self, stage: Stage) -> None:
        packed, nixl, slots = self.packed, self.source.nixl_peer, self.slots
        if packed is None or nixl is None:
            raise LocalError("the tile is not packed", code=ErrorCode.INTERNAL)
        read = data.ReadTile(
            peer=self.source.nixl_agent,
            address=packed.address,
            num_bytes=packed.num_bytes,
            memory_kind=packed.memory,
            remote_device=packed.device,
            device=slots.device,
            slot=_slot_of(stage),
            priority=self.chunk.request.priority,
        )
        stage.read(read, self.source, nixl.defined, slots.defined)

    def _scatter(self, stage: Stage) -> None:
        ranks = [self.chunk.route.engine.ranks[number] for number in self.share.readers]
        scatter = data.Scatter(
            memories=tuple(rank.defined.number for rank in ranks),
            table=self.chunk.request.tables[self.tile.group],
            tile=self.tile,
            device=self.slots.device,
            slot=_slot_of(stage),
            turn=self.chunk.turn,
        )
        stage.start(scatter, self.slots.defined, *(rank.defined for rank in ranks))


def _slot_of(stage: Stage) -> int:
    if stage.transfer.slot is None:
        raise LocalError("the tile has no slot", code=ErrorCode.INTERNAL)
    return stage.transfer.slot


def release_slots(source: Source, slot_ids: tuple[int, ...]) -> None:
    message = wire.Unpack(agent_boot=source.agent_boot, slot_ids=slot_ids)
    source.request(message, UNPACK_TIMEOUT_S, lambda _: None)


@dataclass(slots=True, eq=False, kw_only=True)
class ZeroWork:
    stages: ClassVar[tuple[TransferState, ...]] = (COPYING,)
    chunk: Chunk
    rank: RegisteredRank
    group: str
    span: Span

    def begin(self, stage: Stage) -> None:
        zero = data.Zero(
            memory=self.rank.defined.number,
            group=self.group,
            table=self.chunk.request.tables[self.group],
            span=self.span,
            turn=self.chunk.turn,
        )
        stage.start(zero, self.rank.defined)


@dataclass(slots=True, eq=False, kw_only=True)
class OrderWork:
    """Wait of an agent for the GPU work of its ranks."""

    stages: ClassVar[tuple[TransferState, ...]] = (ORDERING,)
    chunk: Chunk
    source: Source

    def begin(self, stage: Stage) -> None:
        request = self.source.await_work(self.chunk.wanted.after)
        left_s = self.chunk.time_left_s(stage.context.agent.loop.time())
        self.source.request(request, left_s, partial(self._end, stage))

    def _end(self, stage: Stage, reply: Empty | KVBusError) -> None:
        stage.end(error=reply if isinstance(reply, KVBusError) else None)


# Digests are requested when all bytes have landed. The holder checks that the offer is live only
# after it has computed them. Its reply thus describes the bytes that were read. Blocks of an offer
# that ended meanwhile, which may be reused, never count as a mismatch:
#
#     read       READ, copy ──▶ all has landed
#     ours                      ├─ digests ───────────────┐
#     holder                    └─req─▶ digests ─▶ live? ─┴▶ equal? ─▶ chunk ended ─▶ commit
#     offer      live ──────────────────────────────▶
@dataclass(slots=True, eq=False, kw_only=True)
class CompareWork:
    """Comparison of one tile; ``found`` has the holder's digests under None."""

    stages: ClassVar[tuple[TransferState, ...]] = (COMPARING,)
    chunk: Chunk
    source: Source
    share: Share
    tile: Tile
    found: dict[int | None, Digests] = field(default_factory=dict)

    def begin(self, stage: Stage) -> None:
        chunk, tile, offer_id = self.chunk, self.tile, self.chunk.ticket.offer_id
        for number in self.share.readers:
            rank = chunk.route.engine.ranks[number]
            digest = data.DigestJob(
                memory=rank.defined.number,
                table=chunk.request.tables[tile.group],
                tile=tile,
                offer_id=offer_id,
                one_in=chunk.one_in,
                turn=chunk.turn,
            )
            stage.start(digest, rank.defined, then=partial(self._take_reply, stage, number))
        message = wire.Digest(
            **self.source.named,
            offer_id=offer_id,
            rank=self.share.holder,
            tile=tile,
            table=chunk.blocks_of(tile),
            one_in=chunk.one_in,
            secret=chunk.ticket.secret,
        )
        left_s = chunk.time_left_s(stage.context.agent.loop.time())
        self.source.request(message, left_s, partial(self._take, stage, None))

    def _take_reply(self, stage: Stage, rank: int, reply: data.DataReply) -> None:
        result = reply.result
        if isinstance(result, data.Digested):
            self._take(stage, rank, result)
        else:
            error = reply.failure() or LocalError("no digests were made", code=ErrorCode.INTERNAL)
            self._take(stage, rank, error)

    def _take(
        self, stage: Stage, rank: int | None, found: wire.Digests | data.Digested | KVBusError
    ) -> None:
        if isinstance(found, KVBusError):
            stage.end(error=found)
            return
        whole = found.digests[: len(found.digests) // 8 * 8]
        self.found[rank] = np.frombuffer(whole, "<u8")
        if len(self.found) <= len(self.share.readers):
            return
        errors = (self._compare(stage, rank, self.found[None]) for rank in self.share.readers)
        error = next(filter(None, errors), None)
        if error is not None:
            fetch_id = self.chunk.request.fetch_id
            log.error("digest.failed", fetch_id=fetch_id, reason=error.message, **error.detail)
        stage.end(error=error)

    def _compare(self, stage: Stage, rank: int, expected: Digests) -> KVBusError | None:
        found, counts, chunk = self.found[rank], stage.context.digests, self.chunk
        if expected.size != found.size:
            return RemoteError(
                f"the prefill agent sent {expected.size} digests for {found.size} blocks",
                code=ErrorCode.INVALID,
            )
        wrong = np.flatnonzero(expected != found)
        counts["equal",] += found.size - wrong.size
        counts["different",] += wrong.size
        if not wrong.size:
            return None
        tiles = chosen_tiles(self.tile, offer_id=chunk.ticket.offer_id, one_in=chunk.one_in)
        piece, holder = piece_of(tiles, int(wrong[0])), self.share.holder
        return RemoteError(
            f"rank {rank} has other bytes than rank {holder} of prefill engine "
            f"'{self.source.engine_id}': group '{self.tile.group}', layer {piece.layer}, "
            f"'{piece.part}', head {piece.head}, tokens {piece.start} to {piece.stop}; "
            f"{wrong.size} of {found.size} pieces differ",
            code=ErrorCode.DIGEST_MISMATCH,
            rank=rank,
            holder=holder,
            group=self.tile.group,
            num_different=wrong.size,
            **piece._asdict(),
        )
