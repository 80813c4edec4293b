"""How one decode engine reads one prefill engine: which ranks, of which agents, and the plans.

A route is made of what handshakes brought.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kvbus.agent.engine import LocalEngine
from kvbus.errors import GeometryError
from kvbus.geometry import (
    BlockTable,
    EngineSpec,
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
    least_box_bytes,
    span_bytes,
    staged_plans,
)
from kvbus.protocol.peer import CheckMemory, EngineMemory
from kvbus_decode.mapped import MappedMemory
from kvbus_decode.nixl_peers import NixlMemory
from kvbus_decode.peers import Peer


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One agent that has ranks of the prefill engine, and its memory there.

    ``nixl`` is None where NIXL was not told of it, as all of the route is mapped.
    ``slot_bytes`` is the largest box that it packs; 0 when it packs none. ``access`` is shown in
    all that is asked about this memory. ``mapped`` is all of its
    memory, where it is mapped here: a copy from there holds that object. ``unmapped`` is why it is
    not.
    """

    peer: Peer
    agent_boot: str
    engine_id: str
    nixl: NixlMemory | None
    memory_id: str
    access: str = field(repr=False)
    slot_bytes: int
    ranks: Mapping[int, PlacedRank]
    mapped: MappedMemory | None = None
    unmapped: str = ""

    @property
    def is_mapped(self) -> bool:
        """Whether all of its memory is mapped here."""
        return self.mapped is not None and not self.mapped.closed

    @property
    def nixl_agent(self) -> str:
        """What NIXL calls the agent; empty where it does not know it."""
        return self.nixl.agent if self.nixl else ""

    @property
    def named(self) -> dict[str, str]:
        """What names its memory in requests, and shows the right to it."""
        return {
            "agent_boot": self.agent_boot,
            "engine_id": self.engine_id,
            "memory_id": self.memory_id,
            "access": self.access,
        }

    def check(self, offer_id: str, *, progress_s: float = 0.0) -> CheckMemory:
        """Asks an agent that does not see our lease whether its ranks are still the same.

        With ``progress_s`` it also drives what is read within it; without it drives no more.
        """
        return CheckMemory(**self.named, offer_id=offer_id, progress_s=progress_s)


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """What is read from one source; ``direct`` and ``mapped`` are None when that one is not open.

    ``mapped`` is between addresses of this process. The packed path has ``joined`` shares, and so
    has ``staged``, if it is open. Each is read from where its first reader reads anyway, so no
    source has these alone.
    """

    source: Source
    shares: tuple[Share, ...]
    joined: tuple[Share, ...]
    direct: RunPlan | None
    staged: tuple[StagedPlan, ...]
    mapped: RunPlan | None


class Route:
    """From all ranks of a prefill engine to the ranks of a decode engine that are here.

    The first of ``sources`` is the engine's home, where its leases are. Blocks are staged in slots
    of ``slot_bytes`` here, unless all is mapped. Takes some 100 ms for
    engines of many ranks and layers: make it in a thread. Raises `GeometryError` when the ranks do
    not hold all that the decode engine needs.
    """

    def __init__(
        self,
        prefill: EngineSpec,
        sources: tuple[Source, ...],
        engine: LocalEngine,
        slot_bytes: int,
    ) -> None:
        self.prefill, self.sources, self.engine = prefill, sources, engine
        self._slot_bytes = slot_bytes
        self.home, self.others = sources[0], sources[1:]
        """The agent that has the engine's offers, and those that have ranks alone."""
        self.paths: tuple[Path, ...] = ()
        """Those that were open when it was looked at last."""
        self._holders = {rank: source for source in sources for rank in source.ranks}
        placed_there = [placed for source in sources for placed in source.ranks.values()]
        ranks = [placed.rank for placed in placed_there]
        validate_ranks(prefill, ranks)
        held = {group.name for group in prefill.groups}
        self.groups = tuple(group for group in engine.spec.groups if group.name in held)
        """Those of the decode engine, without optional ones that the prefill engine has not."""
        self.missing = [group.name for group in engine.spec.groups if group.name not in held]
        self.readers = {
            n: _without_others(rank.placed(engine.spec), held) for n, rank in engine.ranks.items()
        }
        """The ranks of the decode engine that are here, by number."""
        self.prefill_direct = all(placed.direct for placed in placed_there)
        """Whether READs can start in the blocks of every rank of the prefill engine."""
        self.decode_direct = all(placed.direct for placed in self.readers.values())
        """Whether READs can end in the blocks of every rank that is here."""
        self.decode_mapped = all(rank.mapped_addresses for rank in engine.ranks.values())
        """Whether the memory of every rank that is here is mapped in this process."""
        self._mapped_readers = {
            n: _without_others(rank.mapped(engine.spec), held) for n, rank in engine.ranks.items()
        }
        self._map = ReadMap(
            ranks,
            [placed.rank for placed in self.readers.values()],
            places={number: memory.device for number, memory in engine.ranks.items()},
        )
        self.spans = SpanMap(self.groups, prefill.groups)
        """What fetches move, by group."""
        self._num_blocks: dict[str, int] = {}
        """Blocks that every rank has, by group."""
        for name, num_blocks in (item for rank in ranks for item in rank.num_blocks.items()):
            self._num_blocks[name] = min(num_blocks, self._num_blocks.get(name, num_blocks))
        self._position_bytes = bytes_by_group(self._map.shares(), prefill)
        self._plans = [tuple(self._make_plans(n)) for n in range(self._map.num_choices)]
        every = (plan for plans in self._plans for plan in plans)
        self.is_staged = all(plan.staged for plan in every if plan.joined)
        """Whether blocks can be read as they lie there, into slots here."""
        joined = self._map.joined()
        self.least_box_bytes = least_box_bytes(joined, prefill)
        """The smallest box that the packed path can go in."""
        self._repeated_bytes = self._position_bytes - bytes_by_group(joined, prefill)
        self._next_replica_index = 0
        self.used_at = 0.0
        """When a fetch last took it."""

    @property
    def memory_ids(self) -> tuple[str, ...]:
        """What of the prefill engine's memory was shaken hands about, the home's first."""
        return tuple(source.memory_id for source in self.sources)

    @property
    def is_mapped(self) -> bool:
        """Whether this process has, and still has, the memory of both sides."""
        return self.decode_mapped and all(one.is_mapped for one in self.sources)

    def next_replica_index(self) -> int:
        """Another number for each fetch, so that replicas are read in turn."""
        self._next_replica_index = (self._next_replica_index + 1) % self._map.num_choices
        return self._next_replica_index

    def plans(self, replica_index: int) -> tuple[SourcePlan, ...]:
        return self._plans[replica_index % self._map.num_choices]

    def check_tables(self, tables: Mapping[str, BlockTable], spans: Spans) -> None:
        """Raise `GeometryError` unless the offer's ``tables`` hold ``spans`` in real blocks.

        That no id is there twice has been seen to where the offer was made.
        """
        for group in self.prefill.groups:
            start, stop = spans.get(group.name, (0, 0))
            if start < stop:
                table = tables.get(group.name, BlockTable(b""))
                table.check_below(self._num_blocks[group.name])
                table.check_holds(start, stop, group.block_size, group=group.name)

    def num_bytes(self, spans: Spans) -> int:
        """Bytes of these positions, for all ranks that are here."""
        return span_bytes(self._position_bytes, spans)

    def repeated_bytes(self, spans: Spans) -> int:
        """Bytes that joined shares read once, and the others again for each further rank."""
        return span_bytes(self._repeated_bytes, spans)

    def _make_plans(self, replica_index: int) -> list[SourcePlan]:
        joined = self._by_source(self._map.joined(replica_index))
        return [
            SourcePlan(
                source,
                shares,
                joined.get(source, ()),
                self._direct_plan(source, shares),
                self._staged_plans(source, joined.get(source, ())),
                self._mapped_plan(source, shares),
            )
            for source, shares in self._by_source(self._map.shares(replica_index)).items()
        ]

    def _by_source(self, shares: Iterable[Share]) -> dict[Source, tuple[Share, ...]]:
        found: dict[Source, list[Share]] = defaultdict(list)
        for share in shares:
            found[self._holders[share.holder]].append(share)
        return {source: tuple(shares) for source, shares in found.items()}

    def _direct_plan(self, source: Source, shares: tuple[Share, ...]) -> RunPlan | None:
        if not (self.prefill_direct and self.decode_direct):
            return None
        return RunPlan(source.ranks, self.readers, shares)

    def _staged_plans(self, source: Source, joined: tuple[Share, ...]) -> tuple[StagedPlan, ...]:
        if self.is_mapped or not (self.prefill_direct and self.decode_mapped):
            return ()
        readers, slot_bytes = self._mapped_readers, self._slot_bytes
        return staged_plans(source.ranks, readers, joined, slot_bytes=slot_bytes)

    def _mapped_plan(self, source: Source, shares: tuple[Share, ...]) -> RunPlan | None:
        if not self.is_mapped or source.mapped is None:
            return None
        addresses = source.mapped.addresses
        ranks = {n: replace(there, addresses=addresses[n]) for n, there in source.ranks.items()}
        return RunPlan(ranks, self._mapped_readers, shares)


def _without_others(placed: PlacedRank, groups: Container[str]) -> PlacedRank:
    """The rank with what it has of ``groups`` alone."""
    regions = tuple(one for one in placed.rank.regions if one.group in groups)
    if len(regions) == len(placed.rank.regions):
        return placed
    return replace(placed, rank=msgspec.structs.replace(placed.rank, regions=regions))


def placed_ranks(memory: EngineMemory) -> dict[int, PlacedRank]:
    """The peer's ranks for the planner; raises `GeometryError` for what cannot be."""
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
