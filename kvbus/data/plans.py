"""Plans between memories: the bytes that a job moves."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from math import lcm

from msgspec import structs

from kvbus.data.memories import LocalMemory, RemoteMemory
from kvbus.data.messages import AddPlan
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.memory.cuda import GpuCopier
from kvbus.memory.run_copy import copy_runs
from kvbus.planning import Extents, PlacedRank, RunPlan, Runs, Span, Spans, StagedPlan, Tables
from kvbus.planning import staged_plans as plan_staged

Memory = LocalMemory | RemoteMemory


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPlan:
    """Plan of READs from ``peer``, or of copies if ``peer`` is empty.

    ``extents`` are the local sources.
    """

    peer: str
    runs: RunPlan | None
    staged: tuple[StagedPlan, ...]
    local: tuple[LocalMemory, ...]
    extents: Extents
    strides: Mapping[str, int]
    """Tokens between common block starts of both sides, by group."""
    targets: tuple[LocalMemory, ...]

    @property
    def is_on_host(self) -> bool:
        return all(memory.gpu_copier is None for memory in self.targets)

    def copy(self, runs: Runs) -> None:
        """Copy runs of this plan, each by the processor for its target."""
        copiers = {memory.gpu_copier for memory in self.targets}
        if len(copiers) == 1:
            _copy(runs, copiers.pop())
            return
        for memory in self.targets:
            _copy(runs.with_targets_in(memory.extents), memory.gpu_copier)

    def num_runs(self, spans: Spans) -> int:
        try:
            return self.unstaged.num_runs(spans)
        except KeyError as error:
            raise _lacking(error) from error

    def find(self, source_tables: Tables, target_tables: Tables, spans: Spans) -> Runs:
        try:
            return self.unstaged.runs(source_tables, target_tables, spans)
        except (IndexError, KeyError) as error:
            raise _lacking(error) from error

    def cut(self, spans: Spans, share: float) -> tuple[dict[str, Span], dict[str, Span]]:
        first, rest = dict[str, Span](), dict[str, Span]()
        for group, (start, stop) in spans.items():
            at = int(start + share * (stop - start))
            cut = min(stop, max(start, at - at % self.strides.get(group, 1)))
            first[group], rest[group] = (start, cut), (cut, stop)
        return first, rest

    def find_staged(self, index: int, tables: Tables, tile: Span, slot_at: int) -> Runs:
        try:
            return self.staged_plan(index).reads(tables, tile, slot_at=slot_at)
        except (IndexError, KeyError) as error:
            raise _lacking(error) from error

    @property
    def unstaged(self) -> RunPlan:
        if self.runs is None:
            raise LocalError("the plan is a staged one", code=ErrorCode.INTERNAL)
        return self.runs

    def staged_plan(self, index: int) -> StagedPlan:
        if not 0 <= index < len(self.staged):
            message = f"no staged plan {index} of {len(self.staged)}"
            raise LocalError(message, code=ErrorCode.INTERNAL)
        return self.staged[index]


def _copy(runs: Runs, copier: GpuCopier | None) -> None:
    if copier is None:
        copy_runs(runs)
    else:
        copier.copy(runs)


def _lacking(error: Exception) -> GeometryError:
    return GeometryError(f"the offer's block tables do not hold its tokens: {error}")


def make_plan(
    added: AddPlan, sources: Mapping[int, Memory], targets: Mapping[int, Memory]
) -> PreparedPlan:
    """Call it in a thread: it takes up to 100 ms. Raises `GeometryError`, `LocalError`."""
    peers = {one.peer if isinstance(one, RemoteMemory) else "" for one in sources.values()}
    if len(peers) > 1 or any(isinstance(one, RemoteMemory) for one in targets.values()):
        raise LocalError("a plan has sources of several peers", code=ErrorCode.INTERNAL)
    holders, readers = (_placed(side, added.groups) for side in (sources, targets))
    local = [one for one in (*sources.values(), *targets.values()) if isinstance(one, LocalMemory)]
    held = [one for one in sources.values() if isinstance(one, LocalMemory)]
    is_staged = added.slot_bytes > 0
    try:
        staged = (
            plan_staged(holders, readers, added.shares, slot_bytes=added.slot_bytes)
            if is_staged
            else ()
        )
        runs = None if is_staged else RunPlan(holders, readers, added.shares)
    except KeyError as error:
        message = f"a plan names {error}, of which no address is known"
        raise LocalError(message, code=ErrorCode.INTERNAL) from error
    extents = [extent for one in held for extent in one.extents]
    strides = {
        name: lcm(
            *(one.engine.group(name).block_size for one in (*holders.values(), *readers.values()))
        )
        for name in added.groups
    }
    written = tuple(one for one in targets.values() if isinstance(one, LocalMemory))
    peer = next(iter(peers), "")
    return PreparedPlan(peer, runs, staged, tuple(local), extents, strides, written)


def _placed(side: Mapping[int, Memory], groups: Container[str]) -> dict[int, PlacedRank]:
    return {number: _without_others(one.placed, groups) for number, one in side.items()}


def _without_others(placed: PlacedRank, groups: Container[str]) -> PlacedRank:
    regions = tuple(one for one in placed.rank.regions if one.group in groups)
    if len(regions) == len(placed.rank.regions):
        return placed
    return replace(placed, rank=structs.replace(placed.rank, regions=regions))
