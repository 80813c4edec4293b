"""Copy jobs, in parts that threads take in turns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvbus.data.copiers import Copiers, Part
from kvbus.data.digests import DigestParts
from kvbus.data.memories import LocalMemory
from kvbus.data.messages import (
    Copy,
    CopyStaged,
    Digested,
    DigestJob,
    GatherJob,
    Result,
    Scatter,
    Turn,
    Wipe,
    Zero,
)
from kvbus.data.plans import PreparedPlan
from kvbus.data.slots import Slots
from kvbus.geometry import slot_bytes
from kvbus.planning import Runs

WIPES = Turn(owner="wipe")
GPU_PART_BYTES = 256 << 20
"""A GPU copies this in about 0.2 ms, or 1 ms over NVLink; to start and await it takes 30 us."""


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """``memories`` must still exist at the end."""

    turn: Turn
    memories: tuple[LocalMemory, ...]
    plan: Callable[[], Iterable[Part]]
    result: Callable[[], Result | None] = lambda: None


def copy(job: Copy, plan: PreparedPlan, copiers: Copiers, most: int) -> Copying:
    def parts() -> Iterable[Part]:
        runs = plan.find(job.source_tables, job.target_tables, job.spans)
        runs.check_sources(plan.extents)
        return _cut(runs, plan, copiers, most)

    return Copying(job.turn, plan.local, parts)


def copy_staged(
    job: CopyStaged, plan: PreparedPlan, slots: Slots, copiers: Copiers, most: int
) -> Copying:
    def parts() -> Iterable[Part]:
        staged, slot_at = plan.staged_plan(job.index), slots.address(job.slot)
        runs = staged.copies(job.target_tables, job.tile, slot_at=slot_at)
        return _cut(runs, plan, copiers, most)

    return Copying(job.turn, plan.local, parts)


def scatter(job: Scatter, memories: tuple[LocalMemory, ...], slots: Slots) -> Copying:
    def scatter_into(memory: LocalMemory) -> int:
        memory.check_is_there()
        paged = memory.paged(job.tile.group)
        paged.scatter(job.table, job.tile, slots.place(job.slot))
        return slot_bytes(paged.group, job.tile)

    parts = [partial(scatter_into, memory) for memory in memories]
    return Copying(job.turn, memories, lambda: parts)


def gather(job: GatherJob, memory: LocalMemory, slots: Slots) -> Copying:
    def part() -> int:
        memory.check_is_there()
        paged = memory.paged(job.tile.group)
        paged.gather(job.table, job.tile, slots.place(job.slot))
        return slot_bytes(paged.group, job.tile)

    return Copying(job.turn, (memory,), lambda: (part,))


def zero(job: Zero, memory: LocalMemory) -> Copying:
    def part() -> int:
        memory.check_is_there()
        memory.paged(job.group).zero(job.table, *job.span)
        return 0

    return Copying(job.turn, (memory,), lambda: (part,))


def wipe(job: Wipe, slots: Slots) -> Copying:
    return Copying(WIPES, (), lambda: (partial(slots.wipe, job.slot),))


def digest(job: DigestJob, memory: LocalMemory) -> Copying:
    digests = DigestParts(job, memory)
    return Copying(job.turn, (memory,), digests.parts, lambda: Digested(digests=digests.joined()))


def _cut(runs: Runs, plan: PreparedPlan, copiers: Copiers, most: int) -> Iterable[Part]:
    def part(some: Runs) -> int:
        for memory in plan.local:
            memory.check_is_there()
        plan.copy(some)
        return some.num_bytes

    most = most if plan.is_on_host else GPU_PART_BYTES
    part_bytes = copiers.part_bytes(runs.num_bytes, most=most)
    return [partial(part, some) for some in runs.cut(part_bytes)]
