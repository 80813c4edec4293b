"""Random handoffs: two engines of any parallelism, layout and block size, and tokens of a request.

Plain loops over every element compute the oracle for plans, copies and digests.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    RankSpec,
    StatePart,
    lay_out_rank,
    state_group,
)
from kvbus.planning import PlacedRank, ReadMap, Reads, Run, RunPlan, Runs, SpanMap, Spans
from tests.support.examples import num_examples
from tests.unit.geometry.layouts import Element, Holding, byte_offset, rank_of, styles_of

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def some(long: int, share: int = 4) -> settings:
    examples = num_examples(long, share)
    return settings(max_examples=examples, deadline=None, suppress_health_check=SLOW)


MAX_TP_SIZE, MAX_RANKS = 8, 12
Draw = st.DrawFn
Bytes = npt.NDArray[np.uint8]
Target = tuple[Bytes, int]
Meaning = tuple[str, int, int, str, int, int]
"""Group, position, layer, part, head, dim: which number of a request's KV."""


@dataclass(frozen=True)
class Side:
    """One engine, its memory as one buffer that starts at address ``base``, and block tables.

    ``values`` are the bytes of every element that is asked for; replicas hold the same.
    """

    engine: EngineSpec
    ranks: dict[int, PlacedRank]
    base: int
    tables: Mapping[str, BlockTable]
    memory: bytes = b""
    values: Mapping[Meaning, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    prefill: Side
    decode: Side
    start: int
    stop: int
    replica_index: int

    def moved(self) -> dict[str, list[int]]:
        prefill = self.prefill.engine
        return {
            group.name: moved_positions(group, prefill.group(group.name), self.start, self.stop)
            for group in self.decode.engine.groups
        }

    @property
    def ranks(self) -> tuple[list[RankSpec], list[RankSpec]]:
        """The ranks of the prefill and of the decode engine."""
        prefill, decode = self.prefill.ranks.values(), self.decode.ranks.values()
        return [placed.rank for placed in prefill], [placed.rank for placed in decode]

    @property
    def tables(self) -> tuple[Mapping[str, BlockTable], Mapping[str, BlockTable]]:
        return self.prefill.tables, self.decode.tables

    def plan(self) -> RunPlan:
        shares = ReadMap(*self.ranks).shares(self.replica_index)
        return RunPlan(self.prefill.ranks, self.decode.ranks, shares)

    def spans(self) -> Spans:
        return self.span_map().whole(self.start, self.stop)

    def span_map(self) -> SpanMap:
        return SpanMap(self.decode.engine.groups, self.prefill.engine.groups)

    def runs(self) -> Runs:
        return self.plan().runs(*self.tables, self.spans())


Memory = tuple[bytes, bytes]
"""The decode side's memory after a handoff, and how often each byte is written."""


def copied_by_loops(case: Case) -> Memory:
    after = bytearray(case.decode.memory)
    times = bytearray(len(after))
    for reader in case.decode.ranks.values():
        for meaning, at, num_bytes in where_elements_lie(case.decode, reader, case.moved()):
            after[at : at + num_bytes] = case.prefill.values[meaning]
            for byte in range(at, at + num_bytes):
                times[byte] += 1
    return bytes(after), bytes(times)


def copied(case: Case, runs: Iterable[Run]) -> Memory:
    after = np.frombuffer(case.decode.memory, np.uint8).copy()
    times = np.zeros_like(after)
    move(runs, (case.prefill.memory, case.prefill.base), (after, case.decode.base), times)
    return after.tobytes(), times.tobytes()


def move(runs: Iterable[Run], source: tuple[bytes, int], target: Target, times: Bytes) -> None:
    """Copy runs, none of which leaves the memory of its side. Sides come with their addresses."""
    before, after = np.frombuffer(source[0], np.uint8), target[0]
    for target_address, source_address, size in runs:
        to, out_of = target_address - target[1], source_address - source[1]
        assert 0 <= to <= to + size <= after.size
        assert 0 <= out_of <= out_of + size <= before.size
        after[to : to + size] = before[out_of : out_of + size]
        times[to : to + size] += 1


def placed_ranks(
    engine: EngineSpec, layout: KvLayout, *, num_blocks: int = 8, base: int = 0
) -> dict[int, PlacedRank]:
    """All ranks of an engine in a usual layout, one after the other from ``base`` on."""
    placed = {}
    for number in range(engine.num_ranks):
        rank = lay_out_rank(engine, number, layout, num_blocks=num_blocks)
        placed[number] = PlacedRank(engine, rank, {"kv": base})
        base += rank.segments[0].size_bytes
    return placed


def reads_in(reads: Reads) -> Iterator[Run]:
    columns = reads.local[:, 0], reads.remote[:, 0], reads.local[:, 1]
    return zip(*(column.tolist() for column in columns), strict=True)


@st.composite
def cases(draw: Draw, head_dims: Sequence[int] = (1, 2)) -> Case:
    """Any prefill engine, any decode engine of the same model, any tokens."""
    groups, tp_sizes = draw(_groups(head_dims)), st.integers(1, MAX_TP_SIZE)
    before = draw(st.sampled_from([0, 0, 11]))
    stop = before + draw(st.integers(0, 9))
    start = draw(st.one_of(st.just(before), st.integers(before, stop)))
    return Case(
        prefill=draw(_sides(groups, draw(tp_sizes), (start, stop), base=1 << 40)),
        decode=draw(_sides(groups, draw(tp_sizes), (start, stop), base=7 << 32)),
        start=start,
        stop=stop,
        replica_index=draw(st.integers(0, 12)),
    )


def wanted_positions(group: GroupSpec, start: int, stop: int) -> list[int]:
    """The positions of a group's table that tokens [start, stop) need, one by one."""
    if group.state:
        return [0] if start < stop else []
    window = stop if group.window is None else group.window
    return [position for position in range(start, stop) if stop - position <= window]


def moved_positions(reader: GroupSpec, holder: GroupSpec, start: int, stop: int) -> list[int]:
    """The positions that are read: wanted, or in the block of a wanted one on both sides."""
    wanted = wanted_positions(reader, start, stop)
    if reader.window is None:
        return wanted
    sizes = (reader.block_size, holder.block_size)
    blocks = [{position // size for position in wanted} for size in sizes]
    return [
        position
        for position in range(start, stop)
        if all(position // size in held for size, held in zip(sizes, blocks, strict=True))
    ]


def where_elements_lie(
    side: Side, placed: PlacedRank, positions: Mapping[str, list[int]]
) -> Iterator[tuple[Meaning, int, int]]:
    """Meaning, index in the side's memory and bytes of all that a rank holds at ``positions``."""
    for region in placed.rank.regions:
        group = placed.engine.group(region.group)
        table = side.tables[group.name]
        num_bytes = DTYPE_SIZES_BYTES[group.dtype]
        address = placed.addresses[region.segment_id] - side.base
        for position in positions[group.name]:
            block = int(table.array()[position // group.block_size - table.first_block])
            token = position % group.block_size
            heads = range(region.first_head, region.first_head + region.num_heads)
            for layer, part, head in product(region.layers, region.parts, heads):
                for dim in range(group.part_shape(part).head_dim):
                    element = Element(block, layer, part, token, head, dim)
                    meaning = (group.name, position, layer, part, head, dim)
                    yield meaning, address + byte_offset(region, element), num_bytes


@st.composite
def _groups(draw: Draw, head_dims: Sequence[int]) -> tuple[GroupSpec, ...]:
    """One to three groups whose layers interleave."""
    layers = draw(st.permutations(range(draw(st.sampled_from([1, 2, 3, 4, 4])))))
    kinds = draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=min(3, len(layers))))
    shares = [layers[first:stop] for first, stop in draw(_cuts(len(kinds), len(layers)))]
    groups = []
    for number, (kind, share) in enumerate(zip(kinds, shares, strict=True)):
        if kind == "state":
            parts = tuple(
                StatePart(name, draw(st.sampled_from(_NUM_HEADS)), draw(st.integers(1, 3)))
                for name in ("conv", "ssm")[: draw(st.integers(1, 2))]
            )
            groups.append(state_group(f"g{number}", tuple(share), parts))
            continue
        latent = kind == "latent"
        groups.append(
            GroupSpec(
                name=f"g{number}",
                layers=tuple(share),
                block_size=1,
                num_kv_heads=1 if latent else draw(st.sampled_from(_NUM_HEADS)),
                head_dim=draw(st.sampled_from(head_dims)),
                dtype=draw(st.sampled_from(["uint8", "float16", "float32"])),
                parts=(KvPart.LATENT,) if latent else (KvPart.KEY, KvPart.VALUE),
                window=draw(st.integers(1, 6)) if kind == "window" else None,
            )
        )
    return tuple(groups)


_KINDS = ("full", "full", "window", "latent", "state")
_NUM_HEADS = (1, 2, 3, 4, 6)


def _cuts(count: int, end: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """The spans of ``count`` parts of [0, end)."""
    inner = range(1, end)
    cuts = st.permutations(inner).map(lambda some: sorted(some[: count - 1]))
    return cuts.map(lambda some: list(pairwise((0, *some, end))))


@st.composite
def _sides(
    draw: Draw, groups: tuple[GroupSpec, ...], tp_size: int, tokens: tuple[int, int], *, base: int
) -> Side:
    """An engine with these groups, but block sizes, stages and layouts of its own."""
    num_layers = sum(len(group.layers) for group in groups)
    pp_size = draw(st.integers(1, max(1, min(3, num_layers, MAX_RANKS // tp_size))))
    sized = tuple(
        group if group.state else msgspec.structs.replace(group, block_size=draw(st.integers(1, 6)))
        for group in draw(st.permutations(groups))
    )
    engine = EngineSpec("engine", "model", tp_size, sized, pp_size)
    tables, num_blocks = draw(_tables(sized, *tokens))
    holdings = draw(_holdings(engine))
    styles = draw(st.lists(styles_of(sized), min_size=1, max_size=2))
    placed, end = {}, base
    for number, holding in enumerate(holdings):
        style = styles[number % len(styles)]
        rank = rank_of(engine, number, styles=style, holding=holding, num_blocks=num_blocks)
        addresses = {}
        for segment in rank.segments:
            addresses[segment.segment_id] = end
            end += segment.size_bytes + 3
        placed[number] = PlacedRank(engine, rank, addresses)
    noise = np.random.default_rng(draw(st.integers(0, 255))).bytes(end - base)
    return _with_equal_replicas(Side(engine, placed, base, tables), noise, *tokens)


@st.composite
def _tables(
    draw: Draw, groups: tuple[GroupSpec, ...], start: int, stop: int
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Tables that have the wanted positions, perhaps some more, and blocks of the caches."""
    tables, num_blocks = {}, {}
    for group in groups:
        held = {position // group.block_size for position in wanted_positions(group, start, stop)}
        spare = draw(st.sampled_from([0, 0, 1])) if held and not group.state else 0
        first = max(0, min(held, default=0) - spare)
        count = max(held) + 1 + spare - first if held else 0
        num_blocks[group.name] = max(1, count + draw(st.integers(0, 1)))
        ids = list(range(num_blocks[group.name]))
        ids = ids if draw(st.booleans()) else draw(st.permutations(ids))
        tables[group.name] = BlockTable.of(ids[:count], first_block=first)
    return tables, num_blocks


@st.composite
def _holdings(draw: Draw, engine: EngineSpec) -> list[dict[str, Holding]]:
    """For each rank its stage's layers, split anyhow, and its heads, some ranks perhaps more."""
    layers = draw(st.permutations([layer for group in engine.groups for layer in group.layers]))
    stages = [frozenset(layers[a:b]) for a, b in draw(_cuts(engine.pp_size, len(layers)))]
    more = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return [
        {
            group.name: Holding(
                stage & set(group.layers),
                {
                    part: _heads(tp_rank, engine.tp_size, group.part_shape(part).num_heads, more)
                    for part in group.parts
                },
            )
            for group in engine.groups
        }
        for stage in stages
        for tp_rank in range(engine.tp_size)
    ]


def _heads(tp_rank: int, tp_size: int, num_heads: int, more: int) -> range:
    first, stop = tp_rank * num_heads // tp_size, (tp_rank + 1) * num_heads // tp_size
    return range(first, min(num_heads, max(stop, first + 1) + more))


def _with_equal_replicas(side: Side, noise: bytes, start: int, stop: int) -> Side:
    """``side`` with ``noise`` for its memory, but each replica of an element like the first."""
    memory, values = bytearray(noise), dict[Meaning, bytes]()
    for placed in side.ranks.values():
        held = {g.name: moved_positions(g, g, start, stop) for g in side.engine.groups}
        for meaning, at, num_bytes in where_elements_lie(side, placed, held):
            value = values.setdefault(meaning, bytes(memory[at : at + num_bytes]))
            memory[at : at + num_bytes] = value
    return Side(side.engine, side.ranks, side.base, side.tables, bytes(memory), values)
