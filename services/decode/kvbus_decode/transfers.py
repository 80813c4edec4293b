"""Stages of transfers: jobs of the data process, and requests to the transfer's holder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kvbus.agent.local_engine import engine_lost
from kvbus.agent.loop import failure
from kvbus.agent.service import Agent
from kvbus.data import messages as wire
from kvbus.data.client import Defined, StartedJob
from kvbus.errors import (
    ErrorCode,
    GeometryError,
    KVBusError,
    LocalError,
    RemoteError,
    TransferFailed,
)
from kvbus.memory.run_copy import copy_runs
from kvbus.table.table import Promise
from kvbus_decode.chunk import Chunk
from kvbus_decode.read_table import (
    COPYING,
    READING,
    Begin,
    Event,
    StageEnded,
    Transfer,
    TransferState,
)
from kvbus_decode.remote_agent import Source
from kvbus_decode.route import SourcePlan


class Work(Protocol):
    """Interface of a transfer's work. `begin` ends the stage by `Stage.end`, or by raising."""

    def begin(self, stage: "Stage") -> None: ...


@dataclass(frozen=True, slots=True)
class TransferContext:
    agent: Agent
    lease_s: float
    digests: dict[tuple[str, ...], float]


class Stage:
    """Stage in progress. It ends after `end` was called and its last job has ended."""

    def __init__(
        self, context: TransferContext, command: Begin, on_ended: Callable[[StageEnded], None]
    ) -> None:
        self.context, self.transfer = context, command.transfer
        self.kind: TransferState = command.stage
        self.done: tuple[int, ...] = command.done
        self._on_ended = on_ended
        self._jobs: list[StartedJob] = []
        self._outcome: StageEnded | None = None

    def start(
        self,
        message: wire.Job,
        *uses: Defined,
        then: Callable[[wire.DataReply], None] | None = None,
    ) -> None:
        """Start a job; its end calls ``then``, or ends the stage."""

        def take(reply: wire.DataReply) -> None:
            self._jobs.remove(job)
            try:
                (then or self._end_with)(reply)
            except Exception as error:
                self.end(error=failure(error))
            self._settle()

        job = self.context.agent.data.start(message, take, uses=uses)
        self._jobs.append(job)

    def read(self, message: wire.Job, source: Source, *uses: Defined) -> None:
        if source.remote.closed:
            raise source.remote.loss()

        data = self.context.agent.data
        boot = data.boot

        def end(reply: wire.DataReply) -> None:
            error = reply.failure()
            if data.boot == boot:  # our own data process ended: not the source's fault
                source.note_read(error, undriven=reply.undriven)
            self.end(reply.num_bytes, error)

        self.start(message, *uses, then=end)

    def end(
        self,
        num_bytes: int = 0,
        error: KVBusError | None = None,
        slot_id: int | None = None,
        slot_lease_s: float = 0.0,
    ) -> None:
        """End the stage; an error aborts its jobs. Only the first call counts."""
        if self._outcome is None:
            self._outcome = StageEnded(self.transfer, num_bytes, error, slot_id, slot_lease_s)
            if error is not None:
                self.abort()
        self._settle()

    def abort(self) -> None:
        for job in self._jobs:
            job.abort()

    def _end_with(self, reply: wire.DataReply) -> None:
        self.end(error=reply.failure())

    def _settle(self) -> None:
        if self._outcome is not None and not self._jobs:
            self._on_ended(self._outcome)


class StageRunner:
    def __init__(self, context: TransferContext) -> None:
        self._context = context
        self._running: dict[Transfer, Stage] = {}

    def begin(self, command: Begin, promise: Promise[Event]) -> None:

        def end(ended: StageEnded) -> None:
            if not promise.is_kept:
                del self._running[ended.transfer]
                promise(ended)

        stage = self._running[command.transfer] = Stage(self._context, command, end)
        work: Work = command.transfer.work
        try:
            work.begin(stage)
        except Exception as error:
            stage.end(error=failure(error))  # after its jobs

    def abort(self, transfer: Transfer) -> None:
        if (stage := self._running.get(transfer)) is not None:
            stage.abort()


@contextmanager
def tables_are_checked() -> Iterator[None]:
    try:
        yield
    except (IndexError, KeyError) as error:
        message = f"the offer's block tables do not hold its tokens: {error}"
        raise GeometryError(message) from error


@dataclass(slots=True, eq=False, kw_only=True)
class DirectWork:
    stages: ClassVar[tuple[TransferState, ...]] = (READING,)
    chunk: Chunk
    plan: SourcePlan

    def begin(self, stage: Stage) -> None:
        plan = open_plan(self.plan.read_plan)
        read = wire.Read(
            plan=plan.number,
            source_tables=self.chunk.wanted.tables,
            target_tables=self.chunk.request.tables,
            spans=self.chunk.spans,
            priority=self.chunk.request.priority,
        )
        stage.read(read, self.plan.source, plan)


# Mapped source memory may end at any moment. Its addresses then read as zeros
# (`kvbus_decode.mapped`). A fetch must never complete with such zeros:
#
#     the engine dies   its agent ends its offers, then hangs up: the commit of a fetch that has
#                       read a zero comes later, and is refused
#     its agent dies    no agent is left to confirm a commit
#     the file is cut   by a live engine: its lease stays valid, and a commit would succeed; but the
#                       process that copied sees the cut before the first zero, and its job fails
#
#     copy    ──read──read──[cut]──zero──zero──┐ last part has ended
#                                              └─ was it cut? then the job has failed
#     here    ───────[closed]──DiscardMemory──────── the job has ended ── is it open? no: it failed
#
# A transfer therefore checks its map again after the job. A map that is still open here was open at
# each read of the job.
@dataclass(slots=True, eq=False, kw_only=True)
class MappedWork:
    stages: ClassVar[tuple[TransferState, ...]] = (COPYING,)
    chunk: Chunk
    plan: SourcePlan

    def begin(self, stage: Stage) -> None:
        plan, chunk = open_plan(self.plan.copy_plan), self.chunk
        data = stage.context.agent.data
        boot = data.boot
        self._check_open()

        def end(reply: wire.DataReply) -> None:
            error = self._loss() or reply.failure()
            if error is not None and data.boot == boot:
                self.plan.source.note_failure(error, "copy")
            stage.end(reply.num_bytes, error)

        copy = wire.Copy(
            plan=plan.number,
            source_tables=chunk.wanted.tables,
            target_tables=chunk.request.tables,
            spans=chunk.spans,
            turn=chunk.turn,
        )
        stage.start(copy, plan, then=end)

    def copy_here(self, max_bytes: int) -> int | None:
        """Copy a few short runs on this thread; return the bytes, or None if too many."""
        plan, memory, chunk = self.plan.mapped, self.plan.source.mapped, self.chunk
        if plan is None or memory is None or chunk.num_bytes > max_bytes:
            return None
        with tables_are_checked():
            runs = plan.runs(chunk.wanted.tables, chunk.request.tables, chunk.spans)
        if runs.lattices:
            return None
        runs.check_sources(memory.extents)
        if chunk.route.engine.lost:
            raise engine_lost()
        self._check_open()
        copy_runs(runs)
        self._check_open()
        return runs.num_bytes

    def _check_open(self) -> None:
        if (loss := self._loss()) is not None:
            raise loss

    def _loss(self) -> RemoteError | None:
        memory = self.plan.source.mapped
        if memory is None or not memory.closed:
            return None
        return TransferFailed(f"the memory that was copied from is gone: {memory.closed}")


def open_plan(plan: Defined | None) -> Defined:
    if plan is None:
        raise LocalError("the memory of one side cannot be read so", code=ErrorCode.INTERNAL)
    return plan
