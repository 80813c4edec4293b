"""The legs of boxes: staged here, packed by their holder, zeroed here, or compared."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import structlog

from kvbus.agent.copiers import Job
from kvbus.agent.digests import Digests, Wanted, start_digest
from kvbus.agent.segments import RankMemory
from kvbus.agent.slots import SlotMemory
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, RemoteError
from kvbus.geometry import Box, GroupSpec, slot_bytes
from kvbus.memory.run_copy import copy_runs
from kvbus.planning import Runs, Share, Span, StagedPlan, piece_of
from kvbus.protocol import peer as wire
from kvbus_decode.legs import ChunkLeg, Rows, tables_are_checked
from kvbus_decode.read_table import (
    COMPARING,
    COPYING,
    PACKING,
    QUEUED,
    READING,
    Begin,
    LegState,
    StageEnded,
)
from kvbus_decode.route import Source

log = structlog.get_logger()

UNPACK_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False, kw_only=True)
class StagedLeg(ChunkLeg):
    """Positions ``box`` of a plan: READ into a slot as they lie there, and copied out of it."""

    stages: tuple[LegState, ...] = (QUEUED, READING, COPYING)
    plan: StagedPlan
    box: Span
    slots: SlotMemory

    def begin(self, command: Begin) -> None:
        """Read whole blocks into the slot, or copy them into the blocks of the readers."""
        if self.slot is None:
            self.end_stage(error=LocalError("the box has no slot", code=ErrorCode.INTERNAL))
            return
        at = self.slots.address(self.slot)
        if command.stage is READING:
            self.read_planned(
                self.plan.num_runs({self.plan.group: self.box}), lambda: self._rows(at)
            )
            return

        copiers, most = self.means.agent.copiers, self.means.agent.transport.limits.slice_bytes

        def jobs() -> list[Job]:
            runs = self.plan.copies(self.chunk.asked.tables, self.box, slot_at=at)
            job_bytes = copiers.job_bytes(runs.num_bytes, most=most)
            return [partial(copy_runs, job) for job in runs.cut(job_bytes)]

        self.work = copiers.start_jobs(
            self.chunk.turn, jobs, self.on_copied, engine=self.chunk.route.engine
        )

    def _rows(self, slot_at: int) -> Rows:
        with tables_are_checked():
            runs = self.plan.reads(self.chunk.wanted.tables, self.box, slot_at=slot_at)
        return runs.reads(local_device=self.slots.device), self.slots.memory, "DRAM"


@dataclass(slots=True, eq=False, kw_only=True)
class BoxLeg(ChunkLeg):
    """One box, from a rank of a source into ours; ``packed`` is where it lies there.

    ``slots`` are those here that it is scattered from.
    """

    stages: tuple[LegState, ...] = (PACKING, QUEUED, READING, COPYING)
    share: Share
    group: GroupSpec
    box: Box
    slots: SlotMemory
    packed: wire.Packed | None = None

    def begin(self, command: Begin) -> None:
        """Have it packed, read it into a slot here, or scatter that into the blocks."""
        slot, packed = self.slot, self.packed
        if command.stage is PACKING:
            self._pack(command.done)
        elif slot is None or packed is None:
            self.end_stage(error=LocalError("the box is not packed", code=ErrorCode.INTERNAL))
        elif command.stage is READING:
            whole = Runs(few=((self.slots.address(slot), packed.address, packed.num_bytes),))
            rows = whole.reads(local_device=self.slots.device, remote_device=packed.device)
            self.read_rows((rows, self.slots.memory, packed.memory))
        else:
            ranks = self.chunk.route.engine.ranks
            table = self.chunk.asked.tables[self.box.group]
            self.copy_in_threads(
                lambda memory: memory.scatter(table, self.box, self.slots.view(slot)),
                tuple(ranks[number] for number in self.share.readers),
                self.group,
            )

    def _pack(self, done: tuple[int, ...]) -> None:
        chunk = self.chunk
        message = wire.Pack(
            **self.source.named,
            offer_id=chunk.ticket.offer_id,
            epoch=chunk.wanted.epoch,
            rank=self.share.holder,
            box=self.box,
            table=chunk.blocks_of(self.box),
            slot_lease_s=self.means.lease_s,
            token=chunk.wanted.token,
            done=done,
            priority=chunk.asked.priority,
        )
        self.source.peer.ask(message, self.time_left_s, self._on_packed)

    def _on_packed(self, packed: wire.Packed | KVBusError) -> None:
        if isinstance(packed, KVBusError):
            self.end_stage(error=packed)
            return
        num_bytes = slot_bytes(self.group, self.box)
        if packed.num_bytes != num_bytes:
            release_slots(self.source, (packed.slot_id,))
            message = f"the prefill agent packed {packed.num_bytes} bytes, the box has {num_bytes}"
            self.end_stage(error=GeometryError(message))
            return
        self.packed = packed
        lease = packed.slot_id, packed.slot_lease_s
        self.means.dispatch(StageEnded(self, 0, None, *lease))


def release_slots(source: Source, slot_ids: tuple[int, ...]) -> None:
    """Give slots back; when that fails they come back by themselves, with their lease."""
    message = wire.Unpack(agent_boot=source.agent_boot, slot_ids=slot_ids)
    source.peer.ask(message, UNPACK_TIMEOUT_S, lambda _: None)


@dataclass(slots=True, eq=False, kw_only=True)
class ZeroLeg(ChunkLeg):
    """Positions of one group that are zeroed on one rank."""

    stages: tuple[LegState, ...] = (COPYING,)
    rank: RankMemory
    group: GroupSpec
    span: tuple[int, int]

    def begin(self, _: Begin) -> None:
        table = self.chunk.asked.tables[self.group.name]
        self.copy_in_threads(
            lambda memory: memory.zero(table, *self.span),
            (self.rank,),
            self.group,
        )


# The holder answers if the offer is live once its digests are made, and it is asked when all has
# landed. So an answer is of the bytes that were read, and bytes that differ are never those of an
# offer that ended meanwhile, whose blocks have other uses then:
#
#     read       READ, copy ──▶ all has landed
#     ours                      ├─ digests ───────────────┐
#     holder                    └─ask─▶ digests ─▶ live? ─┴▶ equal? ─▶ chunk ended ─▶ take
#     offer      live ──────────────────────────────▶
@dataclass(slots=True, eq=False, kw_only=True)
class CompareLeg(ChunkLeg):
    """One box of a share; ``found`` has the digests of our ranks, and under None the holder's."""

    stages: tuple[LegState, ...] = (COMPARING,)
    share: Share
    box: Box
    found: dict[int | None, Digests] = field(default_factory=dict)

    def begin(self, _: Begin) -> None:
        chunk, box = self.chunk, self.box
        message = wire.Digest(
            **self.source.named,
            offer_id=chunk.ticket.offer_id,
            rank=self.share.holder,
            box=box,
            table=chunk.blocks_of(box),
            one_in=chunk.one_in,
            secret=chunk.ticket.secret,
        )
        self.source.peer.ask(message, self.time_left_s, self._on_reply)
        engine, wanted = chunk.route.engine, self._wanted()
        for number in self.share.readers:
            on_end, rank = partial(self._take, number), engine.ranks[number]
            start_digest(self.means.agent.copiers, wanted, on_end, engine=engine, rank=rank)

    def _wanted(self) -> Wanted:
        chunk, box = self.chunk, self.box
        table, offer_id = chunk.asked.tables[box.group], chunk.ticket.offer_id
        return Wanted(box, table, offer_id, chunk.one_in, chunk.turn)

    def _on_reply(self, reply: wire.Digests | KVBusError) -> None:
        if isinstance(reply, wire.Digests):
            told = np.frombuffer(reply.digests[: len(reply.digests) // 8 * 8], "<u8")
            self._take(None, told)
        else:
            self._take(None, reply)

    def _take(self, rank: int | None, found: Digests | KVBusError) -> None:
        """The last digests that come are compared; a leg that is over hears nothing of it."""
        if isinstance(found, KVBusError):
            self.end_stage(error=found)
            return
        self.found[rank] = found
        if len(self.found) <= len(self.share.readers):
            return
        errors = (self._compare(rank, self.found[None]) for rank in self.share.readers)
        error = next(filter(None, errors), None)
        if error is not None:
            fetch_id = self.chunk.asked.fetch_id
            log.error("digest.failed", fetch_id=fetch_id, reason=error.message, **error.detail)
        self.end_stage(error=error)

    def _compare(self, rank: int, expected: Digests) -> KVBusError | None:
        """Why the read has failed, if a piece of the rank differs: it names the first that does."""
        found, counts = self.found[rank], self.means.digests
        if expected.size != found.size:
            return RemoteError(
                f"the prefill agent told {expected.size} digests, {found.size} pieces are compared",
                code=ErrorCode.INVALID,
            )
        wrong = np.flatnonzero(expected != found)
        counts["equal",] += found.size - wrong.size
        counts["different",] += wrong.size
        if not wrong.size:
            return None
        piece, holder = piece_of(self._wanted().boxes(), int(wrong[0])), self.share.holder
        return RemoteError(
            f"rank {rank} has other bytes than rank {holder} of prefill engine "
            f"'{self.source.engine_id}': group '{self.box.group}', layer {piece.layer}, "
            f"'{piece.part}', head {piece.head}, tokens {piece.start} to {piece.stop}; "
            f"{wrong.size} of {found.size} pieces differ",
            code=ErrorCode.DIGEST_MISMATCH,
            rank=rank,
            holder=holder,
            group=self.box.group,
            num_different=wrong.size,
            **piece._asdict(),
        )
