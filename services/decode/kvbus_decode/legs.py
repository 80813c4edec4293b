"""The legs of a chunk, and how each stage of one is carried out.

READs happen on the transport's thread, copies in threads of their own; READs of many descriptors
are planned in a thread as well. What each stage came to is told as `StageEnded`, once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from kvbus.agent.copiers import Job, Work
from kvbus.agent.loop import guarded, in_thread
from kvbus.agent.segments import RankMemory
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, PeerLost, RemoteError
from kvbus.geometry import GroupSpec
from kvbus.memory.copying import PagedMemory
from kvbus.memory.run_copy import copy_runs
from kvbus.planning import Reads, RunPlan, Runs
from kvbus.protocol.message import Empty
from kvbus.transport import MemoryKind, Read, ReadOutcome, ReadStatus
from kvbus_decode.chunk import Chunk
from kvbus_decode.nixl_peers import NixlPeer, NixlPeers
from kvbus_decode.read_table import (
    COPYING,
    READING,
    Begin,
    Event,
    Leg,
    LegState,
    StageEnded,
)
from kvbus_decode.route import SourcePlan

Rows = tuple[Reads, MemoryKind, MemoryKind]
"""READs, and the kinds of memory: ours and theirs."""

MAX_INLINE_DESCRIPTORS = 16_384
LOSS_KNOWN_WITHIN_S = 2.0
UNTOLD = (ErrorCode.TIMEOUT, ErrorCode.FORBIDDEN)
"""An engine that came back has another access: who has the one before is told nothing."""


@dataclass(frozen=True, slots=True)
class Means:
    """What legs are carried out with; ``dispatch`` takes what their stages came to.

    Slots are asked for with ``lease_s``. ``digests`` counts pieces that were compared.
    """

    agent: Agent
    nixl: NixlPeers
    dispatch: Callable[[Event], None]
    lease_s: float
    digests: dict[tuple[str, ...], float]


@dataclass(slots=True, eq=False, kw_only=True)
class ChunkLeg(Leg):
    """A leg of a chunk, and what it is at: a READ, or a copy in threads."""

    chunk: Chunk
    means: Means
    transfer: Read | None = None
    nixl_peer: NixlPeer | None = None
    work: Work | None = None
    aborted: bool = False

    def begin(self, command: Begin) -> None:
        """Carry out the stage that is due; what this raises ends the stage."""
        raise NotImplementedError

    def abort(self) -> None:
        """Begin no further part: NIXL cannot take back what was posted, nor a thread a job."""
        self.aborted = True
        if self.transfer is not None:
            self.transfer.abort()
        if self.work is not None:
            self.work.stop(LocalError("the copy was aborted", code=ErrorCode.CANCELLED))

    def end_stage(self, num_bytes: int = 0, error: KVBusError | None = None) -> None:
        """The stage has ended: nothing of it is in flight."""
        self.means.dispatch(StageEnded(self, num_bytes, error))

    @property
    def time_left_s(self) -> float:
        return max(1e-3, self.chunk.fetch.deadline - self.means.agent.loop.time())

    def read_rows(self, rows: Rows) -> None:
        """Post READs, of which the end ends the stage; with none it has ended."""
        descriptors, here, there = rows
        if self.aborted or not len(descriptors.local):
            self.end_stage()
            return
        self.nixl_peer = self.means.nixl.find(self.source.nixl_agent)
        self.transfer = self.means.agent.transport.read(
            self.source.nixl_agent,
            descriptors.local,
            descriptors.remote,
            on_end=self._on_read,
            local_memory=here,
            remote_memory=there,
            priority=self.chunk.asked.priority,
        )

    def read_planned(self, num_runs: int, rows: Callable[[], Rows]) -> None:
        """Post the READs of ``rows``, of about ``num_runs``; many are planned in a thread."""
        if num_runs > MAX_INLINE_DESCRIPTORS:
            self.means.agent.tasks.start_soon(self._plan_aside, rows)
        else:
            self.read_rows(rows())

    async def _plan_aside(self, rows: Callable[[], Rows]) -> None:
        async def plan() -> None:
            self.read_rows(await in_thread(rows))

        await guarded(plan, lambda error: self.end_stage(error=error))

    def copy_in_threads(
        self,
        copy: Callable[[PagedMemory], None],
        ranks: tuple[RankMemory, ...],
        group: GroupSpec,
    ) -> None:
        """Have ``copy`` called for one group of each of the ranks, which ends the stage."""
        self.work = self.means.agent.copiers.start(
            self.chunk.turn,
            lambda: (copy,),
            self.on_copied,
            engine=self.chunk.route.engine,
            memories=ranks,
            group=group,
        )

    def _on_read(self, outcome: ReadOutcome) -> None:
        self.transfer = None  # it holds its descriptors
        error: KVBusError | None = outcome.error
        if isinstance(error, PeerLost) and self.nixl_peer is not None:
            self.nixl_peer.is_broken = True
        if outcome.status is ReadStatus.ABORTED:
            error = LocalError("the read was aborted", code=ErrorCode.CANCELLED)
        self.end_stage(outcome.num_bytes, error)

    def on_copied(self, error: KVBusError | None) -> None:
        self.work = None
        self.end_stage(error=error)


@contextmanager
def tables_are_checked() -> Iterator[None]:
    """Raises `GeometryError` where a plan finds that the offer's block tables lack a block."""
    try:
        yield
    except (IndexError, KeyError) as error:
        message = f"the offer's block tables do not hold its tokens: {error}"
        raise GeometryError(message) from error


def _runs(plan: RunPlan, chunk: Chunk) -> Runs:
    """The chunk's bytes by ``plan``; raises `GeometryError`."""
    with tables_are_checked():
        return plan.runs(chunk.wanted.tables, chunk.asked.tables, chunk.spans)


@dataclass(slots=True, eq=False, kw_only=True)
class DirectLeg(ChunkLeg):
    """All that is read from one source, straight into the blocks."""

    stages: tuple[LegState, ...] = (READING,)
    plan: SourcePlan

    def begin(self, _: Begin) -> None:
        direct = self.plan.direct
        self.read_planned(direct.num_runs(self.chunk.spans) if direct else 0, self._rows)

    def _rows(self) -> Rows:
        """Raises `GeometryError`, and `LocalError` where NIXL knows one side not."""
        if self.plan.direct is None:
            raise LocalError("the memory of one side is not registered", code=ErrorCode.CONFIG)
        return _runs(self.plan.direct, self.chunk).reads(), "DRAM", "DRAM"


# The memory that is copied from may end at any moment; the bytes under its addresses are zeros then
# (`kvbus_decode.mapped`). A fetch must not be completed with them:
#
#     the engine dies   its offers end in its agent, and then that hangs up: a fetch that has read
#                       a zero takes later, and is refused
#     its agent dies    no one is left to say yes
#     the file is cut   by an engine that lives: its lease goes on, and a take would get a yes;
#                       but the map is closed before the first zero is there
#
#     copy   ──read──read──[closed]──zero──zero──┐ last job has ended
#                                                └─ is the map open? no: the leg has failed
#
# So a leg asks after its last job: a map that is open then was so at each of its reads. It asks in
# all three cases, and needs the first two for nothing.
@dataclass(slots=True, eq=False, kw_only=True)
class MappedLeg(ChunkLeg):
    """All that is copied from one source whose memory is mapped here, straight into the blocks."""

    stages: tuple[LegState, ...] = (COPYING,)
    plan: SourcePlan
    copied_bytes: list[int] = field(default_factory=list)
    """Of each job that was done."""

    def begin(self, _: Begin) -> None:
        """Copy it in threads, cut so that all have some, and others get their turn."""
        copiers, most = self.means.agent.copiers, self.means.agent.transport.limits.slice_bytes

        def jobs() -> list[Job]:
            runs = self.runs()
            job_bytes = copiers.job_bytes(runs.num_bytes, most=most)
            return [partial(self.copy, job) for job in runs.cut(job_bytes)]

        self.work = copiers.start_jobs(
            self.chunk.turn,
            jobs,
            partial(self.count, self.end_stage),
            engine=self.chunk.route.engine,
        )

    def copy_at_once(self, runs: Runs, end: Callable[[int, KVBusError | None], None]) -> None:
        """Copy all of it now; nothing is in flight when ``end`` is called."""
        self.means.agent.copiers.start_jobs(
            self.chunk.turn,
            lambda: (partial(self.copy, runs),),
            partial(self.count, end),
            engine=self.chunk.route.engine,
            at_once=True,
        )

    def runs(self) -> Runs:
        """All bytes to copy; raises `GeometryError`."""
        mapped, memory = self.plan.mapped, self.plan.source.mapped
        if mapped is None or memory is None:
            raise LocalError("the memory of one side is not mapped", code=ErrorCode.INTERNAL)
        runs = _runs(mapped, self.chunk)
        runs.check_sources(memory.extents)
        return runs

    def copy(self, runs: Runs) -> None:
        if self._loss() is None:
            copy_runs(runs)
            self.copied_bytes.append(runs.num_bytes)

    def count(
        self, end: Callable[[int, KVBusError | None], None], error: KVBusError | None
    ) -> None:
        """No job of it runs: what was read counts if it was there to the end.

        Else its agent is asked, which may know what has become of it.
        """
        self.work = None
        loss, num_bytes = self._loss(), sum(self.copied_bytes)
        if error is not None or loss is None:
            end(num_bytes, error)
            return

        def end_lost(answer: Empty | KVBusError) -> None:
            if isinstance(answer, KVBusError) and answer.code not in UNTOLD:
                end(num_bytes, answer)
            else:
                end(num_bytes, loss)

        source = self.plan.source
        check = source.check(self.chunk.ticket.offer_id)
        source.peer.ask(check, LOSS_KNOWN_WITHIN_S, end_lost)

    def _loss(self) -> RemoteError | None:
        """The error if the source memory was closed during the copy."""
        memory = self.plan.source.mapped
        if memory is None or not memory.closed:
            return None
        message = f"the memory that was copied from is gone: {memory.closed}"
        return RemoteError(message, code=ErrorCode.TRANSFER_FAILED)
