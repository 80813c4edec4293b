"""What a fetch is on each path, and which path it takes."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given

from kvbus.errors import GeometryError, LocalError
from kvbus.geometry import EngineSpec, GroupSpec, canonical_order
from kvbus.planning import (
    FetchWork,
    Path,
    PathWork,
    PlacedRank,
    ReadMap,
    Share,
    choose_path,
    cut_into_boxes,
    reader_order,
    usual_box_bytes,
)
from tests.planning.handoffs import Case, cases, copied_by_loops, placed_ranks, some

KIB, MIB = 1 << 10, 1 << 20
SLOT_BYTES = 8 * MIB
Ranks = dict[int, PlacedRank]


def work_of(prefill: Ranks, decode: Ranks, replica_index: int = 0) -> FetchWork:
    reads = ReadMap(*([one.rank for one in side.values()] for side in (prefill, decode)))
    return FetchWork(prefill, decode, reads.shares(replica_index), reads.joined(replica_index))


@some(300)
@given(cases())
def test_bytes_runs_and_least_boxes_are_those_that_a_plan_moves(case: Case) -> None:
    reads, spans, number = ReadMap(*case.ranks), case.spans(), case.replica_index
    work = work_of(case.prefill.ranks, case.decode.ranks, number)
    num_bytes = sum(copied_by_loops(case)[1])
    num_runs = len(list(case.runs()))

    shape = work.shape(spans, mapped=True)

    assert shape[Path.DIRECT] == PathWork(num_bytes=num_bytes, num_runs=num_runs)
    assert shape[Path.MAPPED] == PathWork(num_bytes=num_bytes, num_runs=num_runs)
    assert (Path.PACKED in shape) == (num_bytes > 0)
    if num_bytes:
        assert num_bytes - shape[Path.PACKED].num_bytes == work.repeated_bytes(spans) >= 0
    for path in {Path.PACKED, Path.REORDERED} & shape.keys():
        least = work.least_box_bytes(path)
        shares = reads.joined(number) if path is Path.PACKED else reads.shares(number)
        assert all(can_be_cut(case, share, path, box_bytes=least) for share in shares)
        assert path in work.shape(spans, slot_bytes=least)
        assert path not in work.shape(spans, slot_bytes=least - 1)


def can_be_cut(case: Case, share: Share, path: Path, *, box_bytes: int) -> bool:
    group, order = case.decode.engine.group(share.group), canonical_order()
    if path is Path.REORDERED:
        readers = reader_order(case.decode.ranks[share.reader].rank.regions, group)
        assert readers
        order = readers
    try:
        cut_into_boxes(share, group, (0, 1), order=order, box_bytes=box_bytes)
    except GeometryError:
        return False
    return True


GROUP = GroupSpec("group", (0, 1), 16, 8, 128, "bfloat16")


def ranks(layout: str, *, tp: int = 1) -> Ranks:
    return placed_ranks(EngineSpec("engine", "model", tp, (GROUP,)), layout)


@pytest.mark.parametrize(
    ("prefill", "decode", "closed"),
    [(True, False, {"direct", "reordered"}), (False, True, {"direct"}), (True, True, set())],
)
def test_ranks_without_addresses_are_read_in_boxes_and_mapped_as_those_with_them(
    prefill: bool, decode: bool, closed: set[str]
) -> None:
    sides, spans = (ranks("NHD", tp=2), ranks("HND")), {"group": (0, 40)}
    usual = work_of(*sides).shape(spans, mapped=True)
    for side, is_registered in zip(sides, (prefill, decode), strict=True):
        if not is_registered:
            side[max(side)] = replace(side[max(side)], addresses={})
    work = work_of(*sides)

    shape = work.shape(spans, mapped=True)

    for path in Path:
        assert shape.get(path) == (None if path in closed else usual.get(path))
    assert Path.MAPPED not in work.shape(spans)


def test_a_reader_whose_regions_differ_in_order_cannot_have_it_in_its_order() -> None:
    nhd, hnd = ranks("NHD")[0], ranks("HND")[0]
    regions = (nhd.rank.regions[0], hnd.rank.regions[1])
    mixed = replace(nhd, rank=msgspec.structs.replace(nhd.rank, regions=regions))

    shape = work_of(ranks("NHD"), {0: mixed}).shape({"group": (0, 16)})

    assert Path.PACKED in shape
    assert Path.REORDERED not in shape


EQUAL = {"num_bytes": 64 * MIB, "num_runs": 8192, "repeated_bytes": 0}
SHORT_RUNS = {**EQUAL, "num_runs": 8193}
REPEATED = {**EQUAL, "repeated_bytes": 1}
LITTLE = {"num_bytes": MIB, "num_runs": 129, "repeated_bytes": MIB}
ALL = tuple(Path)


@pytest.mark.parametrize(
    ("fetch", "paths", "expected"),
    [
        (EQUAL, ALL, Path.MAPPED),
        (EQUAL, ALL[:3], Path.DIRECT),
        (SHORT_RUNS, ALL[:3], Path.PACKED),
        (SHORT_RUNS, (Path.DIRECT, Path.REORDERED), Path.REORDERED),
        (SHORT_RUNS, (Path.DIRECT,), Path.DIRECT),
        (REPEATED, ALL[:3], Path.PACKED),
        (EQUAL, (Path.PACKED, Path.REORDERED), Path.PACKED),
        (LITTLE, ALL[:3], Path.PACKED),
        (LITTLE | {"num_runs": 128}, ALL[:3], Path.DIRECT),
        (LITTLE | {"num_runs": 128}, (Path.PACKED,), Path.PACKED),
    ],
)
def test_which_path_is_chosen(
    fetch: dict[str, int], paths: tuple[Path, ...], expected: Path
) -> None:
    assert choose_path(paths, **fetch) is expected
    with pytest.raises(LocalError, match="none of the paths"):
        choose_path((), **fetch)


@pytest.mark.parametrize(
    ("num_bytes", "box_bytes"), [(4 * KIB, MIB), (3 * MIB, 3 * MIB // 2), (64 * MIB, SLOT_BYTES)]
)
def test_boxes_are_two_at_least_unless_these_were_small(num_bytes: int, box_bytes: int) -> None:
    assert usual_box_bytes(num_bytes, slot_bytes=SLOT_BYTES) == box_bytes
    assert usual_box_bytes(num_bytes, slot_bytes=KIB) == KIB
