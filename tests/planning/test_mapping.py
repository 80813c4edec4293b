"""Every element that a decode rank holds is read from one rank that has it, and replicas share."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import (
    EngineSpec,
    GroupSpec,
    KvLayout,
    KvPart,
    RankSpec,
    lay_out_rank,
)
from kvbus.planning import MAX_CHOICES, ReadMap, Share
from tests.planning.handoffs import TP_SIZES, Case, cases, some

Place = tuple[str, int, str, int]
"""Group, layer, part, head."""

SOME = some(150)
NHD = KvLayout.parse("NHD")
LATENT = (KvPart.LATENT,)
KV = (KvPart.KEY, KvPart.VALUE)


def ranks_of(
    tp_size: int,
    num_heads: int,
    *,
    pp_size: int = 1,
    parts: tuple[KvPart, ...] = KV,
    num_layers: int = 4,
) -> list[RankSpec]:
    group = GroupSpec("full", tuple(range(num_layers)), 4, num_heads, 8, "float16", parts)
    engine = EngineSpec("engine", "model", tp_size, (group,), pp_size)
    return [lay_out_rank(engine, rank, NHD, num_blocks=2) for rank in range(engine.num_ranks)]


def held_by(rank: RankSpec) -> set[Place]:
    return {
        (region.group, layer, part, head)
        for region in rank.regions
        for layer in region.layers
        for part in region.parts
        for head in range(region.first_head, region.first_head + region.num_heads)
    }


def places_of(share: Share) -> Iterator[Place]:
    for layer in share.layers:
        for part in share.parts:
            for head in range(share.first_head, share.first_head + share.num_heads):
                yield share.group, layer, part, head


def assert_one_holder_each(
    shares: Iterable[Share], reader: RankSpec, prefill: Iterable[RankSpec]
) -> None:
    """The reader has each of its places from one rank, which holds it."""
    found, held = defaultdict(list), {rank.rank: held_by(rank) for rank in prefill}
    for share in shares:
        for place in places_of(share) if reader.rank in share.readers else ():
            found[place].append(share.holder)
    assert found.keys() == held_by(reader)
    assert all(len(holders) == 1 for holders in found.values())
    assert all(place in held[holders[0]] for place, holders in found.items())


@SOME
@given(cases(), st.lists(st.integers(0, 1), min_size=8))
def test_every_place_of_every_reader_has_one_holder_that_has_it(
    case: Case, drawn: list[int]
) -> None:
    prefill, decode = case.ranks
    places = {rank.rank: drawn[rank.rank % len(drawn)] for rank in decode}
    reads = ReadMap(prefill, decode, places=places)

    shares, joined = reads.shares(case.replica_index), reads.joined(case.replica_index)

    for reader in decode:
        assert_one_holder_each(shares, reader, prefill)
        assert_one_holder_each(joined, reader, prefill)
    assert all(len({places[reader] for reader in share.readers}) == 1 for share in joined)
    times = Counter(place for share in joined for place in places_of(share))
    assert times == times_read(decode, prefill, places)


def times_read(
    decode: Iterable[RankSpec], prefill: list[RankSpec], places: dict[int, int]
) -> dict[Place, int]:
    """Equal heads are read once for all readers in one place."""
    wanted: dict[Place, set[tuple[int, int, int]]] = defaultdict(set)
    for reader in decode:
        for place in held_by(reader):
            wanted[place].add((places[reader.rank], *interval_around(place, reader, prefill)))
    return {place: len(intervals) for place, intervals in wanted.items()}


def interval_around(place: Place, reader: RankSpec, prefill: Iterable[RankSpec]) -> tuple[int, int]:
    """The heads that the reader wants together with this one: those that the same ranks hold."""
    head, edges = place[3], set[int]()
    for rank in (*prefill, reader):
        heads = {held[3] for held in held_by(rank) if held[:3] == place[:3]}
        edges |= {min(heads), max(heads) + 1} if heads else set()
    return max(e for e in edges if e <= head), min(e for e in edges if e > head)


@SOME
@given(cases())
def test_over_all_choices_each_reader_reads_each_replica_equally_often(case: Case) -> None:
    prefill, decode = case.ranks
    reads = ReadMap(prefill, decode)
    times: dict[tuple[int, Place], Counter[int]] = defaultdict(Counter)

    for replica_index in range(reads.num_choices):
        for share in reads.shares(replica_index):
            for place in places_of(share):
                times[share.reader, place][share.holder] += 1

    for (_, place), holders in times.items():
        replicas = [rank.rank for rank in prefill if place in held_by(rank)]
        counts = [holders[rank] for rank in replicas]
        uneven = reads.num_choices % len(replicas) > 0
        assert sum(counts) == reads.num_choices
        assert max(counts) - min(counts) <= uneven


@SOME
@given(cases())
def test_within_a_fetch_the_readers_of_the_same_replicas_take_turns(case: Case) -> None:
    prefill, decode = case.ranks
    held = {rank.rank: held_by(rank) for rank in prefill}
    readers: dict[tuple[int, ...], set[tuple[int, int]]] = defaultdict(set)

    for share in ReadMap(prefill, decode).shares(case.replica_index):
        for place in places_of(share):
            replicas = tuple(rank for rank, places in held.items() if place in places)
            readers[replicas].add((share.reader, share.holder))

    for replicas, pairs in readers.items():
        times = Counter(holder for _, holder in pairs)
        most, least = max(times.values()), min(times[rank] for rank in replicas)
        assert most - least <= 1
        assert len({reader for reader, _ in pairs}) == len(pairs)


def test_a_latent_that_is_joined_comes_from_another_replica_for_the_next_fetch() -> None:
    reads = ReadMap(ranks_of(4, 1, parts=LATENT), ranks_of(8, 1, parts=LATENT))

    holders = [share.holder for index in range(5) for share in reads.joined(index)]

    assert holders == [0, 1, 2, 3, 0]


def expected_heads(rank: int, tp_size: int, num_heads: int) -> range:
    first, stop = rank * num_heads // tp_size, (rank + 1) * num_heads // tp_size
    return range(first, max(stop, first + 1))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12])
@pytest.mark.parametrize(
    "sizes", [*TP_SIZES, (4, 8), (16, 4)], ids=lambda one: f"{one[0]}to{one[1]}"
)
def test_each_reader_gets_its_heads_in_as_few_shares_as_there_are_holders_of_them(
    sizes: tuple[int, int], num_heads: int
) -> None:
    prefill_tp, decode_tp = sizes
    holders = {rank: expected_heads(rank, prefill_tp, num_heads) for rank in range(prefill_tp)}

    shares = ReadMap(ranks_of(prefill_tp, num_heads), ranks_of(decode_tp, num_heads)).shares()

    for reader in range(decode_tp):
        mine = [share for share in shares if share.reader == reader]
        wanted = expected_heads(reader, decode_tp, num_heads)
        heads = sorted(
            head for one in mine for head in range(one.first_head, one.first_head + one.num_heads)
        )
        distinct = {tuple(held) for held in holders.values() if set(held) & set(wanted)}
        assert heads == list(wanted)
        assert len(mine) == len(distinct)
        assert all(share.layers == (0, 1, 2, 3) and share.parts == KV for share in mine)


@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8])
def test_a_latent_is_read_whole_from_one_rank_and_another_one_for_the_next_fetch(
    decode_tp: int,
) -> None:
    reads = ReadMap(ranks_of(4, 1, parts=LATENT), ranks_of(decode_tp, 1, parts=LATENT))

    fetches = [
        [share.holder for share in reads.shares(replica_index)] for replica_index in range(8)
    ]

    assert all(len(holders) == decode_tp for holders in fetches)
    assert [holders[0] for holders in fetches] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(len(set(holders)) == min(4, decode_tp) for holders in fetches)


def test_readers_of_different_agents_take_different_replicas_without_knowing_each_other() -> None:
    prefill, decode = ranks_of(4, 1, parts=LATENT), ranks_of(4, 1, parts=LATENT)

    shares = [
        share for here in (decode[:2], decode[2:]) for share in ReadMap(prefill, here).shares()
    ]

    assert [share.holder for share in shares] == [0, 1, 2, 3]


@given(st.integers(0, 200))
def test_the_choices_repeat_after_as_many_as_the_map_says(replica_index: int) -> None:
    reads = ReadMap(ranks_of(6, 1, parts=LATENT), ranks_of(2, 1, parts=LATENT))

    again = reads.shares(replica_index + reads.num_choices)

    assert reads.num_choices == 6
    assert again == reads.shares(replica_index)


def test_the_choices_stay_few_however_many_replicas_there_are() -> None:
    reads = ReadMap(
        ranks_of(2 * MAX_CHOICES, 1, parts=LATENT, num_layers=1),
        ranks_of(1, 1, parts=LATENT, num_layers=1),
    )

    assert reads.num_choices == MAX_CHOICES


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
def test_what_no_prefill_rank_holds_is_refused_by_name(
    lacking: Callable[[RankSpec], RankSpec], named: str
) -> None:
    prefill, decode = [lacking(rank) for rank in ranks_of(1, 4)], ranks_of(1, 4)

    with pytest.raises(GeometryError, match=named) as refused:
        ReadMap(prefill, decode)

    assert refused.value.code is ErrorCode.INCOMPATIBLE
    assert refused.value.detail == {"field": "ranks"}
    assert "decode rank 0" in refused.value.message


def test_what_no_reader_wants_need_not_be_held() -> None:
    prefill = ranks_of(1, 4)
    first_half = msgspec.structs.replace(prefill[0], regions=prefill[0].regions[:2])

    shares = ReadMap([first_half], ranks_of(1, 4, pp_size=2)[:1]).shares()

    assert [share.layers for share in shares] == [(0, 1)]
