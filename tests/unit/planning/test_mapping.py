"""Every element that a decode rank holds is read from one rank that has it, and replicas share."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart, RankSpec, Region, lay_out_rank
from kvbus.planning import MAX_CHOICES, ReadMap, Share
from tests.unit.planning.handoffs import Case, cases, some

Place = tuple[str, int, str, int]
"""Group, layer, part, head."""
Shares = Iterable[Share]
NHD = KvLayout.parse("NHD")


def ranks_of(tp_size: int, num_heads: int = 1) -> list[RankSpec]:
    """Ranks with a latent if there is one head, else with K and V."""
    parts = (KvPart.LATENT,) if num_heads == 1 else (KvPart.KEY, KvPart.VALUE)
    group = GroupSpec("full", (0, 1, 2, 3), 4, num_heads, 8, "float16", parts)
    engine = EngineSpec("engine", "model", tp_size, (group,))
    return [lay_out_rank(engine, rank, NHD, num_blocks=2) for rank in range(engine.num_ranks)]


def places_of(one: Share | Region) -> Iterator[Place]:
    heads = range(one.first_head, one.first_head + one.num_heads)
    return product([one.group], one.layers, one.parts, heads)


def held_by(rank: RankSpec) -> set[Place]:
    return {place for region in rank.regions for place in places_of(region)}


def assert_one_holder_each(shares: Shares, reader: RankSpec, prefill: list[RankSpec]) -> None:
    """The reader has each of its places from one rank, which holds it."""
    found, held = defaultdict(list), {rank.rank: held_by(rank) for rank in prefill}
    for share in shares:
        for place in places_of(share) if reader.rank in share.readers else ():
            found[place].append(share.holder)
    assert found.keys() == held_by(reader)
    assert all(len(holders) == 1 for holders in found.values())
    assert all(place in held[holders[0]] for place, holders in found.items())


@some(150)
@given(cases(), st.lists(st.integers(0, 1), min_size=8))
def test_readers_get_all_from_holders_and_replicas_take_turns(case: Case, drawn: list[int]) -> None:
    prefill, decode = case.ranks
    places = {rank.rank: drawn[rank.rank % len(drawn)] for rank in decode}
    reads = ReadMap(prefill, decode, places=places)

    shares, joined = reads.shares(case.replica_index), reads.joined(case.replica_index)

    for reader in decode:
        assert_one_holder_each(shares, reader, prefill)
        assert_one_holder_each(joined, reader, prefill)
    assert all(len({places[reader] for reader in share.readers}) == 1 for share in joined)
    equal = Counter(
        (place, share.first_head, share.num_heads, places[share.reader])
        for share in joined
        for place in places_of(share)
    )
    assert set(equal.values()) <= {1}, "equal heads for readers of one place are read once"
    assert_turns_within_a_fetch(shares, prefill)
    assert_turns_over_all_choices(reads, prefill)


def assert_turns_within_a_fetch(shares: Iterable[Share], prefill: Iterable[RankSpec]) -> None:
    held = {rank.rank: held_by(rank) for rank in prefill}
    readers: dict[tuple[int, ...], set[tuple[int, int]]] = defaultdict(set)
    for share in shares:
        for place in places_of(share):
            replicas = tuple(rank for rank, places in held.items() if place in places)
            readers[replicas].add((share.reader, share.holder))
    for replicas, pairs in readers.items():
        times = Counter(holder for _, holder in pairs)
        assert max(times.values()) - min(times[rank] for rank in replicas) <= 1
        assert len({reader for reader, _ in pairs}) == len(pairs)


def assert_turns_over_all_choices(reads: ReadMap, prefill: Iterable[RankSpec]) -> None:
    times: dict[tuple[int, Place], Counter[int]] = defaultdict(Counter)
    for replica_index in range(reads.num_choices):
        for share in reads.shares(replica_index):
            for place in places_of(share):
                times[share.reader, place][share.holder] += 1
    for (_, place), holders in times.items():
        counts = [holders[rank.rank] for rank in prefill if place in held_by(rank)]
        assert sum(counts) == reads.num_choices
        assert max(counts) - min(counts) <= (reads.num_choices % len(counts) > 0)


def test_agents_unaware_of_each_other_read_different_replicas() -> None:
    prefill, decode = ranks_of(4), ranks_of(4)
    agents = ReadMap(prefill, decode[:2]), ReadMap(prefill, decode[2:])
    shares = [share for reads in agents for share in reads.shares()]
    assert [share.holder for share in shares] == [0, 1, 2, 3]


def test_the_choices_stay_few_however_many_replicas_there_are() -> None:
    few, many = (ReadMap(ranks_of(replicas), ranks_of(2)) for replicas in (6, 2 * MAX_CHOICES))
    assert (few.num_choices, many.num_choices) == (6, MAX_CHOICES)


def without_first_head(rank: RankSpec) -> RankSpec:
    regions = [msgspec.structs.replace(one, first_head=1, num_heads=3) for one in rank.regions]
    return msgspec.structs.replace(rank, regions=tuple(regions))


def without_last_layer(rank: RankSpec) -> RankSpec:
    return msgspec.structs.replace(rank, regions=rank.regions[:-1])


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        (without_first_head, "heads 0 to 1 of full/0/k"),
        (without_last_layer, "heads 0 to 4 of full/3/k"),
    ],
)
def test_part_of_no_rank_is_named(lacking: Callable[[RankSpec], RankSpec], named: str) -> None:
    prefill, decode = [lacking(rank) for rank in ranks_of(1, 4)], ranks_of(1, 4)
    with pytest.raises(GeometryError, match=f"{named}, which decode rank 0") as refused:
        ReadMap(prefill, decode)
    assert refused.value.code is ErrorCode.INCOMPATIBLE
    assert refused.value.detail == {"field": "ranks"}
    assert ReadMap(prefill, [lacking(rank) for rank in decode]).shares()
