"""Routes and their plans."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from kvbus.agent.local_engine import LocalEngine
from kvbus.data.client import DataProcess, Defined
from kvbus.data.messages import HOST, AddPlan, AddRemote, RemoveMemory, RemovePlan
from kvbus.errors import GeometryError
from kvbus.geometry import (
    NO_BLOCKS,
    BlockTable,
    EngineSpec,
    RankSpec,
    check_readable,
    validate_engine,
    validate_rank,
    validate_ranks,
)
from kvbus.planning import (
    Path,
    PlacedRank,
    ReadMap,
    RunPlan,
    Share,
    SpanMap,
    Spans,
    StagedPlan,
    bytes_by_group,
    least_tile_bytes,
    span_bytes,
    staged_plans,
)
from kvbus.protocol.peer import EngineMemory
from kvbus_decode.mapped import MappedMemory
from kvbus_decode.remote_agent import Source


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """Plans for one source; None or empty where the path is closed.

    A ``joined`` share is read from the source of its first reader. No source has joined shares
    alone.
    """

    source: Source
    shares: tuple[Share, ...]
    joined: tuple[Share, ...]
    direct: RunPlan | None = None
    read_plan: Defined | None = None
    staged: tuple[StagedPlan, ...] = ()
    staged_plan: Defined | None = None
    mapped: RunPlan | None = None
    copy_plan: Defined | None = None

    @property
    def data_plans(self) -> list[Defined]:
        return list(filter(None, (self.read_plan, self.staged_plan, self.copy_plan)))


@dataclass(frozen=True, slots=True)
class PathChoice:
    path: Path
    tile_bytes: int = 0


class Route:
    """Route from a prefill engine to the local ranks of a decode engine.

    The first of ``sources`` is the engine's home. Construction takes up to 100 ms: run it in a
    thread. Raises `GeometryError`.
    """

    def __init__(
        self,
        prefill: EngineSpec,
        sources: tuple[Source, ...],
        engine: LocalEngine,
        *,
        slot_bytes: int,
        data: DataProcess,
    ) -> None:
        self.prefill, self.sources, self.engine = prefill, sources, engine
        self.on_close: Callable[[], object] = lambda: None
        self._slot_bytes, self._data = slot_bytes, data
        self.home, self.remote_sources = sources[0], sources[1:]
        self.paths: tuple[Path, ...] = ()
        self._holders = {rank: source for source in sources for rank in source.ranks}
        placed_there = [placed for source in sources for placed in source.ranks.values()]
        ranks = [placed.rank for placed in placed_there]
        validate_ranks(prefill, ranks)
        held = {group.name for group in prefill.groups}
        self.groups = tuple(group for group in engine.spec.groups if group.name in held)
        """Without optional groups that the prefill engine lacks."""
        self.missing = [group.name for group in engine.spec.groups if group.name not in held]
        ours = engine.ranks.values()
        self.readers = {one.rank.rank: _placed(engine.spec, one.rank, held) for one in ours}
        self.prefill_direct = all(placed.direct for placed in placed_there)
        self.decode_direct = all(rank.direct for rank in ours)
        self.decode_on_host = all(rank.device == HOST for rank in ours)
        self._map = ReadMap(
            ranks,
            [placed.rank for placed in self.readers.values()],
            places={number: memory.device for number, memory in engine.ranks.items()},
        )
        self.spans = SpanMap(self.groups, prefill.groups)
        self._num_blocks: dict[str, int] = {}
        """Blocks that every rank has."""
        for name, num_blocks in (item for rank in ranks for item in rank.num_blocks.items()):
            self._num_blocks[name] = min(num_blocks, self._num_blocks.get(name, num_blocks))
        self._position_bytes = bytes_by_group(self._map.shares(), prefill)
        self._plans = [tuple(self._make_plans(n)) for n in range(self._map.num_choices)]
        every = (plan for plans in self._plans for plan in plans)
        self.is_staged = all(plan.staged for plan in every if plan.joined)
        """Whether whole blocks can be read into slots here."""
        joined = self._map.joined()
        self.least_tile_bytes = least_tile_bytes(joined, prefill)
        self._repeated_bytes = self._position_bytes - bytes_by_group(joined, prefill)
        self._next_replica_index = 0
        self.used_at = 0.0

    @property
    def memory_ids(self) -> tuple[str, ...]:
        return tuple(source.memory_id for source in self.sources)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        return tuple(f"{source.memory_id} {source.nixl_agent}" for source in self.remote_sources)

    @property
    def is_mapped(self) -> bool:
        return all(one.is_mapped for one in self.sources)

    def next_replica_index(self) -> int:
        """Rotate, so that fetches share replicas."""
        self._next_replica_index = (self._next_replica_index + 1) % self._map.num_choices
        return self._next_replica_index

    def plans(self, replica_index: int) -> tuple[SourcePlan, ...]:
        return self._plans[replica_index % self._map.num_choices]

    def check_tables(self, tables: Mapping[str, BlockTable], spans: Spans) -> None:
        """Raise `GeometryError` unless the offer's ``tables`` hold ``spans`` in real blocks.

        The prefill agent has checked that no id appears twice.
        """
        for group in self.prefill.groups:
            start, stop = spans.get(group.name, (0, 0))
            if start < stop:
                table, num_blocks = tables.get(group.name, NO_BLOCKS), self._num_blocks[group.name]
                check_readable(group, table, (start, stop), num_blocks=num_blocks)

    def num_bytes(self, spans: Spans) -> int:
        return span_bytes(self._position_bytes, spans)

    def repeated_bytes(self, spans: Spans) -> int:
        return span_bytes(self._repeated_bytes, spans)

    def close(self) -> None:
        """Close the route; the data process drops its definitions after their last job."""
        on_close, self.on_close = self.on_close, lambda: None
        on_close()
        for plans in self._plans:
            for plan in (one for source_plan in plans for one in source_plan.data_plans):
                self._data.remove(plan)
        for source in self.sources:
            source.remote.sources.pop(source, None)
            for rank in source.remotes.values():
                self._data.remove(rank)

    def _make_plans(self, replica_index: int) -> list[SourcePlan]:
        joined = self._by_source(self._map.joined(replica_index))
        return [
            self._plan_source(source, shares, joined.get(source, ()))
            for source, shares in self._by_source(self._map.shares(replica_index)).items()
        ]

    def _plan_source(
        self, source: Source, shares: tuple[Share, ...], joined: tuple[Share, ...]
    ) -> SourcePlan:
        plan = SourcePlan(source, shares, joined)
        is_registered, mapped = self.prefill_direct and bool(source.remotes), source.mapped
        if is_registered and self.decode_direct:
            direct = RunPlan(source.ranks, self.readers, shares)
            plan = replace(plan, direct=direct, read_plan=self._define(source.remotes, shares))
        if self.is_mapped and mapped is not None:
            here = self._mapped_plan(source, mapped, shares)
            plan = replace(plan, mapped=here, copy_plan=self._define(mapped.ranks, shares))
        elif is_registered and self.decode_on_host:
            size = self._slot_bytes
            staged = staged_plans(source.ranks, self.readers, joined, slot_bytes=size)
            if staged:
                staged_plan = self._define(source.remotes, joined, slot_bytes=size)
                plan = replace(plan, staged=staged, staged_plan=staged_plan)
        return plan

    def _define(
        self, sources: Mapping[int, Defined], shares: tuple[Share, ...], *, slot_bytes: int = 0
    ) -> Defined:
        number, ranks = self._data.new_number(), self.engine.ranks
        add = AddPlan(
            plan=number,
            sources={rank: defined.number for rank, defined in sources.items()},
            targets={rank: memory.defined.number for rank, memory in ranks.items()},
            shares=shares,
            groups=tuple(group.name for group in self.groups),
            slot_bytes=slot_bytes,
        )
        needs = (*sources.values(), *(memory.defined for memory in ranks.values()))
        return Defined(add, RemovePlan(plan=number), needs)

    def _by_source(self, shares: Iterable[Share]) -> dict[Source, tuple[Share, ...]]:
        found: dict[Source, list[Share]] = defaultdict(list)
        for share in shares:
            found[self._holders[share.holder]].append(share)
        return {source: tuple(shares) for source, shares in found.items()}

    def _mapped_plan(
        self, source: Source, mapped: MappedMemory, shares: tuple[Share, ...]
    ) -> RunPlan | None:
        """Return a plan for copies by the control process; None for GPU memory."""
        if not mapped.addresses:
            return None
        held, engine = {group.name for group in self.prefill.groups}, self.engine
        there = {
            n: _placed(self.prefill, placed.rank, held, mapped.addresses[n])
            for n, placed in source.ranks.items()
        }
        here = {
            n: _placed(engine.spec, memory.rank, held, memory.mapped_addresses)
            for n, memory in engine.ranks.items()
        }
        if not all(placed.addresses for placed in here.values()):
            return None
        return RunPlan(there, here, shares)


def _placed(
    engine: EngineSpec,
    rank: RankSpec,
    groups: Container[str],
    addresses: Mapping[str, int] | None = None,
) -> PlacedRank:
    regions = tuple(one for one in rank.regions if one.group in groups)
    if len(regions) < len(rank.regions):
        rank = msgspec.structs.replace(rank, regions=regions)
    if addresses is None:
        addresses = {segment.segment_id: 0 for segment in rank.segments}
    return PlacedRank(engine, rank, addresses)


def add_remotes(
    data: DataProcess, memory: EngineMemory, peer_name: str, peer: Defined
) -> dict[int, Defined]:
    remotes = dict[int, Defined]()
    for rank, addresses in zip(memory.ranks, memory.addresses, strict=True):
        if addresses:
            number = data.new_number()
            add = AddRemote(
                memory=number,
                peer=peer_name,
                engine=memory.engine,
                rank=rank,
                addresses=dict(addresses),
            )
            remotes[rank.rank] = Defined(add, RemoveMemory(memory=number), (peer,))
    return remotes


def placed_ranks(memory: EngineMemory) -> dict[int, PlacedRank]:
    validate_engine(memory.engine)
    if len(memory.addresses) != len(memory.ranks):
        raise GeometryError(f"{len(memory.ranks)} ranks with {len(memory.addresses)} addresses")
    placed: dict[int, PlacedRank] = {}
    for rank, addresses in zip(memory.ranks, memory.addresses, strict=True):
        validate_rank(memory.engine, rank)
        named = {segment.segment_id for segment in rank.segments}
        if addresses and not named <= addresses.keys():
            raise GeometryError(f"rank {rank.rank} has segments without an address")
        placed[rank.rank] = PlacedRank(memory.engine, rank, addresses)
    return placed
