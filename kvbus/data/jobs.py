"""Jobs of a data process. Each gets one reply, after all of its I/O has ended."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kvbus.data import copies
from kvbus.data import definitions as named
from kvbus.data import messages as wire
from kvbus.data.copiers import Copiers, CopyJob
from kvbus.data.copies import Copying
from kvbus.data.definitions import Definitions
from kvbus.data.memories import LocalMemory
from kvbus.data.plans import PreparedPlan
from kvbus.data.reads import NixlReads
from kvbus.data.replies import Background, Replies
from kvbus.data.scheduler import ReadJob
from kvbus.data.slots import Slots
from kvbus.errors import ErrorCode, KVBusError, LocalError, PeerLost
from kvbus.fair import Key
from kvbus.memory.run_copy import copy_runs
from kvbus.planning import MAX_FEW, Reads, Runs

MAX_JOBS = 1 << 16
MAX_INLINE_RUNS, FIRST_RUNS = 2048, 512
SHORT_COPY_BYTES = 128 << 10
"""Limit of copies in the main thread: 30 to 130 µs with the plan. A thread starts in 70 µs."""


class Jobs:
    def __init__(
        self,
        definitions: Definitions,
        copiers: Copiers,
        background: Background,
        replies: Replies,
        *,
        slice_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._definitions, self._find = definitions, definitions.find
        self._copiers, self._background, self._replies = copiers, background, replies
        self._slice_bytes, self._clock = slice_bytes, clock
        self._aborts: dict[int, Callable[[], object]] = {}
        self._starts: dict[type[Any], Callable[[Any], None]] = {
            wire.Read: self._read,
            wire.ReadStaged: self._read_staged,
            wire.ReadTile: self._read_tile,
            wire.Copy: self._copy,
            wire.CopyStaged: self._copy_staged,
            wire.Scatter: self._scatter,
            wire.GatherJob: self._gather,
            wire.Zero: self._zero,
            wire.Wipe: self._wipe,
            wire.DigestJob: self._digest,
        }

    def accept(self, job: wire.Job) -> None:
        if len(self._aborts) >= MAX_JOBS:
            raise LocalError(f"{MAX_JOBS} jobs are in flight", code=ErrorCode.BUSY)
        self._aborts[job.id] = partial(self.fail, job, _cancelled())

    def start(self, job: wire.Job) -> None:
        if job.id in self._aborts:
            self._starts[type(job)](job)

    def abort(self, number: int) -> None:
        abort = self._aborts.get(number)
        if abort is not None:
            abort()

    def fail(self, job: wire.Job, error: Exception) -> None:
        self._end(wire.DataReply(to=job.id, error=wire.Failure.of(self._replies.to_error(error))))

    def _end(self, reply: wire.DataReply) -> None:
        self._aborts.pop(reply.to, None)
        self._replies.send(reply)

    # READs.

    # A thread plans the rest of a long READ while the main thread posts its first slices:
    #
    #     main thread    plan 512 runs ─ post ── post ── post ── ...
    #     a thread                       plan the others ─┘
    def _read(self, job: wire.Read) -> None:
        plan: PreparedPlan = self._find(named.plan(job.plan))

        def reads_of(spans: wire.Spans) -> Reads:
            return plan.find(job.source_tables, job.target_tables, spans).reads()

        num_runs = plan.num_runs(job.spans)
        if num_runs <= MAX_INLINE_RUNS:
            self._post_read(job, plan.peer, reads_of(job.spans), ("DRAM", "DRAM"))
            return
        first, rest = plan.cut(job.spans, FIRST_RUNS / num_runs)
        post_rest = self._post_read(job, plan.peer, reads_of(first), ("DRAM", "DRAM"), num_parts=2)
        self._background.start(partial(reads_of, rest), post_rest)

    def _read_staged(self, job: wire.ReadStaged) -> None:
        plan: PreparedPlan = self._find(named.plan(job.plan))
        slots: Slots = self._find(named.slots(job.device))
        slot_at = slots.address(job.slot)

        runs = plan.find_staged(job.index, job.source_tables, job.tile, slot_at)
        rows = runs.reads(local_device=slots.device)
        self._post_read(job, plan.peer, rows, (slots.memory, "DRAM"))

    def _read_tile(self, job: wire.ReadTile) -> None:
        slots: Slots = self._find(named.slots(job.device))
        slot_at = slots.address(job.slot)
        if job.num_bytes > slots.slot_bytes:
            message = f"{job.num_bytes} bytes do not fit a slot of {slots.slot_bytes}"
            raise LocalError(message, code=ErrorCode.INTERNAL)
        whole = Runs(few=((slot_at, job.address, job.num_bytes),))
        rows = whole.reads(local_device=slots.device, remote_device=job.remote_device)
        self._post_read(job, job.peer, rows, (slots.memory, job.memory_kind))

    def _post_read(
        self,
        job: wire.Read | wire.ReadStaged | wire.ReadTile,
        peer: str,
        rows: Reads,
        kinds: tuple[wire.MemoryKind, wire.MemoryKind],
        *,
        num_parts: int = 1,
    ) -> Callable[[Reads | Exception], None]:
        reads: NixlReads = self._find(named.NIXL)
        if self._definitions.get(named.peer(peer)) is None:  # it may have waited for its plan
            raise PeerLost("the peer was removed before the READ began", peer=peer)
        self._find(named.peer(peer))
        read = reads.read(
            peer,
            rows,
            kinds=kinds,
            priority=job.priority,
            on_end=partial(self._end_read, job),
            num_parts=num_parts,
        )
        if job.id in self._aborts:
            self._aborts[job.id] = partial(reads.abort, read)

        def post_rest(planned: Reads | Exception) -> None:
            if isinstance(planned, Exception):
                planned = self._replies.to_error(planned)
            reads.go_on(read, planned)

        return post_rest

    def _end_read(self, job: wire.DataRequest, read: ReadJob) -> None:
        error: KVBusError | None = read.error
        if error is None and read.aborted:
            error = _cancelled()
        self._end(
            wire.DataReply(
                to=job.id,
                error=None if error is None else wire.Failure.of(error),
                num_bytes=read.num_bytes,
                undriven=error is None and read.at_once,
            )
        )

    # Copies.

    def _copy(self, job: wire.Copy) -> None:
        plan: PreparedPlan = self._find(named.plan(job.plan))
        if plan.is_on_host and plan.num_runs(job.spans) <= MAX_FEW:
            runs = plan.find(job.source_tables, job.target_tables, job.spans)
            if runs.num_bytes <= SHORT_COPY_BYTES:
                self._copy_now(job, plan, runs)
                return
        self._start_copy(job, copies.copy(job, plan, self._copiers, self._slice_bytes))

    def _copy_now(self, job: wire.Copy, plan: PreparedPlan, runs: Runs) -> None:
        runs.check_sources(plan.extents)
        began = self._clock()
        copy_runs(runs)
        for memory in plan.local:
            memory.check_is_there()
        seconds = self._clock() - began
        self._end(wire.DataReply(to=job.id, num_bytes=runs.num_bytes, seconds=seconds))

    def _copy_staged(self, job: wire.CopyStaged) -> None:
        plan: PreparedPlan = self._find(named.plan(job.plan))
        slots: Slots = self._find(named.slots(job.device))
        most = self._slice_bytes
        self._start_copy(job, copies.copy_staged(job, plan, slots, self._copiers, most))

    def _scatter(self, job: wire.Scatter) -> None:
        memories = tuple(map(self._find_local, job.memories))
        self._start_copy(job, copies.scatter(job, memories, self._find(named.slots(job.device))))

    def _gather(self, job: wire.GatherJob) -> None:
        memory = self._find_local(job.memory)
        self._start_copy(job, copies.gather(job, memory, self._find(named.slots(job.device))))

    def _zero(self, job: wire.Zero) -> None:
        self._start_copy(job, copies.zero(job, self._find_local(job.memory)))

    def _wipe(self, job: wire.Wipe) -> None:
        self._start_copy(job, copies.wipe(job, self._find(named.slots(job.device))))

    def _digest(self, job: wire.DigestJob) -> None:
        self._start_copy(job, copies.digest(job, self._find_local(job.memory)))

    def _find_local(self, number: int) -> LocalMemory:
        found = self._find(named.memory(number))
        if not isinstance(found, LocalMemory):
            raise LocalError(f"memory {number} is at a peer", code=ErrorCode.INTERNAL)
        return found

    def _start_copy(self, job: wire.Job, copying: Copying) -> None:
        turn = Key(copying.turn.owner, copying.turn.priority)
        work = CopyJob(turn, copying.plan, partial(self._end_copy, job, copying))
        self._aborts[job.id] = partial(work.stop, _cancelled())
        self._copiers.start(work)

    def _end_copy(self, job: wire.DataRequest, copying: Copying, work: CopyJob) -> None:
        error, result = work.error, None
        try:
            if error is None:
                for memory in copying.memories:
                    memory.check_is_there()
                result = copying.result()
        except Exception as caught:
            error = self._replies.to_error(caught)
        self._end(
            wire.DataReply(
                to=job.id,
                error=None if error is None else wire.Failure.of(error),
                num_bytes=work.num_bytes,
                seconds=work.seconds,
                result=result,
            )
        )


def _cancelled() -> LocalError:
    return LocalError("the job was aborted", code=ErrorCode.CANCELLED)
