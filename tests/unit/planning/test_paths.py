"""What a fetch is, and which path it takes."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given

from kvbus import planning
from kvbus.errors import GeometryError, LocalError
from tests.unit.planning.handoffs import Case, cases, copied_by_loops, some

KIB, MIB = 1 << 10, 1 << 20
SLOT_BYTES = 8 * MIB


@some(300)
@given(cases())
def test_bytes_runs_and_least_tiles_are_those_that_a_plan_moves(case: Case) -> None:
    reads, spans, engine = planning.ReadMap(*case.ranks), case.spans(), case.decode.engine
    joined = reads.joined(case.replica_index)
    regions = (region for rank in case.ranks[1] for region in rank.regions)
    held, read = planning.bytes_by_group(regions, engine), planning.bytes_by_group(joined, engine)
    least = planning.least_tile_bytes(joined, engine)
    num_bytes = planning.span_bytes(held, spans)
    assert num_bytes == sum(copied_by_loops(case)[1]) == case.runs().num_bytes
    assert held == planning.bytes_by_group(reads.shares(case.replica_index), engine)
    assert read <= held
    assert all(can_be_cut(case, share, least) for share in joined)
    assert not all(can_be_cut(case, share, least - 1) for share in joined)


def can_be_cut(case: Case, share: planning.Share, tile_bytes: int) -> bool:
    with suppress(GeometryError):
        group = case.decode.engine.group(share.group)
        return bool(planning.cut_into_tiles(share, group, (0, 1), tile_bytes=tile_bytes))
    return False


EQUAL = {"num_bytes": 64 * MIB, "num_runs": 8192, "repeated_bytes": 0, "num_staged_runs": 8192}
SHORT_RUNS = {**EQUAL, "num_runs": 8193}
REPEATED = {**EQUAL, "repeated_bytes": 1}
SHORT_BLOCKS = {**SHORT_RUNS, "num_staged_runs": 8193}
LITTLE = {"num_bytes": MIB, "num_runs": 129, "repeated_bytes": MIB, "num_staged_runs": 1}
ALL = tuple(planning.Path)


@pytest.mark.parametrize(
    ("fetch", "paths", "expected"),
    [
        (EQUAL, ALL, planning.Path.MAPPED),
        (EQUAL, ALL[:3], planning.Path.DIRECT),
        (SHORT_RUNS, ALL[:3], planning.Path.STAGED),
        (SHORT_RUNS, (planning.Path.DIRECT, planning.Path.PACKED), planning.Path.PACKED),
        (SHORT_RUNS, (planning.Path.DIRECT,), planning.Path.DIRECT),
        (SHORT_BLOCKS, ALL[:3], planning.Path.PACKED),
        (SHORT_BLOCKS, ALL[:2], planning.Path.STAGED),
        (REPEATED, (planning.Path.DIRECT, planning.Path.PACKED), planning.Path.PACKED),
        ({**REPEATED, "num_staged_runs": 8191}, ALL[:3], planning.Path.STAGED),
        (EQUAL, (planning.Path.PACKED,), planning.Path.PACKED),
        (LITTLE, ALL[:3], planning.Path.PACKED),
        (LITTLE | {"num_runs": 128}, ALL[:3], planning.Path.DIRECT),
        (LITTLE | {"num_runs": 128}, (planning.Path.PACKED,), planning.Path.PACKED),
    ],
)
def test_the_path_is_chosen(
    fetch: dict[str, int], paths: tuple[planning.Path, ...], expected: planning.Path
) -> None:
    assert planning.choose_path(paths, **fetch) is expected
    with pytest.raises(LocalError, match="none of the paths"):
        planning.choose_path((), **fetch)


@pytest.mark.parametrize(
    ("num_bytes", "tile_bytes"), [(4 * KIB, MIB), (3 * MIB, 3 * MIB // 2), (64 * MIB, SLOT_BYTES)]
)
def test_tiles_are_two_at_least_unless_these_were_small(num_bytes: int, tile_bytes: int) -> None:
    assert planning.usual_tile_bytes(num_bytes, least=1, slot_bytes=SLOT_BYTES) == tile_bytes
    assert planning.usual_tile_bytes(num_bytes, least=1, slot_bytes=KIB) == KIB
    assert planning.usual_tile_bytes(num_bytes, least=5 * MIB, slot_bytes=SLOT_BYTES) >= 5 * MIB


def truly_s(num_bytes: int) -> float:
    return 3e-3 + num_bytes / 3e9


@pytest.mark.parametrize("num_bytes", [64 * KIB, 3 * MIB, 64 * MIB])
def test_learned_time_nears_truth_and_slow_link_is_soon_believed(num_bytes: int) -> None:
    learned, random = planning.Learned(), Random(1)
    for _ in range(300):
        size = int(64 * KIB * 2 ** random.uniform(0, 10))
        learned.observe(size, truly_s(size) * random.lognormvariate(0, 0.05))
    predicted_s = learned.predict_s(num_bytes)
    for _ in range(10):
        learned.observe(num_bytes, 10 * truly_s(num_bytes))
    assert predicted_s == pytest.approx(truly_s(num_bytes), rel=0.15)
    assert learned.predict_s(num_bytes) > 5 * truly_s(num_bytes)


def test_one_fetch_is_believed_in_bounds_and_empty_one_ignored() -> None:
    learned, bounded = planning.Learned(), planning.Learned()
    before_s = learned.predict_s(64 * MIB)
    learned.observe(64 * MIB, 3 * before_s)
    for num_bytes, seconds in ((64 * MIB, 1e9), (0, 1.0), (64 * MIB, 0.0)):
        bounded.observe(num_bytes, seconds)
    assert learned.predict_s(64 * MIB) == pytest.approx(3 * before_s, rel=0.1)
    assert bounded.predict_s(64 * MIB) <= 100 * before_s
    assert bounded.num_observed == 1
