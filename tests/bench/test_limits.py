"""What limits a handoff is told by the part that takes longest; numbers that a person can check."""

import pytest

from kvbus.bench.engines import TimedFetch
from kvbus.bench.sides.cases import CASES, MIB
from kvbus.bench.sides.limits import Measured, PathTimes
from kvbus.bench.sides.report import report
from kvbus.protocol import Fetched, Outcome, StageTimes

SECOND_OF_BEST = 64.0 * MIB


def fetch(
    path: str = "direct", *, num_bytes: int = 64 * MIB, seconds: float = 1.0, **stages_s: float
) -> TimedFetch:
    fetched = Fetched(
        "f",
        "r",
        Outcome.COMPLETED,
        "confirming",
        blocks_free=True,
        num_bytes=num_bytes,
        path=path,
        stages_s=StageTimes(**stages_s),
    )
    return TimedFetch(seconds, fetched)


def limit_of(one: TimedFetch, case: str = "runs-16k") -> str:
    return PathTimes(CASES[case], one.fetched.path, [one]).limit(SECOND_OF_BEST)


@pytest.mark.parametrize(
    ("stages_s", "limit"),
    [
        ({"claiming": 0.3, "confirming": 0.6}, "90% round trips to the prefill agent"),
        ({"queued": 0.8, "reading": 0.2}, "80% turns behind other fetches"),
        ({"resolving": 0.5, "meeting": 0.1, "reading": 0.4}, "60% meeting the prefill agent"),
        ({"waiting": 0.9}, "90% tokens that were not ready"),
        ({"reading": 0.2}, "80% engine and agent here"),
    ],
)
def test_the_part_that_takes_longest_is_told(stages_s: dict[str, float], limit: str) -> None:
    assert limit_of(fetch(**stages_s)) == limit


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("mapped", "memory of this machine"),
        ("direct", "network, or memory"),
        ("packed", "gathers, network, scatters"),
        ("reordered", "gathers, network"),
        ("a path of tomorrow", "a path of tomorrow"),
    ],
)
def test_what_reading_is_depends_on_the_path(path: str, why: str) -> None:
    assert limit_of(fetch(path, reading=1.0)) == f"100% reading: {why}"


def test_runs_are_to_blame_when_they_are_short_and_longer_ones_are_faster() -> None:
    slow, fast = {"reading": 1.5, "seconds": 1.5}, {"reading": 1.4, "seconds": 1.4}

    assert limit_of(fetch(**slow)) == "100% reading: short runs"
    assert limit_of(fetch(**fast)) == "100% reading: network, or memory"
    assert limit_of(fetch(**slow), "runs-256k") == "100% reading: network, or memory"
    assert limit_of(fetch("packed", **slow)) == "100% reading: gathers, network, scatters"


def test_a_small_read_is_said_to_be_one() -> None:
    assert limit_of(fetch(num_bytes=65536, reading=1.0)) == "100% reading: one small READ"
    assert limit_of(fetch("mapped", num_bytes=65536, reading=1.0)) == "100% reading: one small copy"


def test_medians_are_over_the_handoffs_of_a_path_and_without_the_first() -> None:
    handoffs = [fetch(seconds=s, reading=s) for s in (2.0, 4.0, 9.0)]
    packed = fetch("packed", seconds=3.0, reading=3.0)
    measured = Measured(CASES["runs-16k"], fetch(seconds=70.0), [*handoffs, packed])

    table, sentences, found = report([measured])

    direct, other = found["figures"]
    assert (direct["path"], direct["handoffs"], other["path"], other["handoffs"]) == (
        *("direct", 3),
        *("packed", 1),
    )
    assert (direct["p50_ms"], direct["p99_ms"]) == (4000, 9000)
    assert direct["bytes_per_s"] == pytest.approx(16 * MIB)
    assert direct["parts_ms"]["reading"] == 4000
    assert found["first_ms"] == 70_000
    assert (table.row_count, sentences) == (2, ["Most is 22.4 MB/s, runs-16k by packed."])


def test_a_table_shows_three_digits_or_all_of_a_number() -> None:
    handoffs = [fetch(seconds=s, reading=s) for s in (0.01234, 0.01234, 1.2344)]

    table, _, _ = report([Measured(CASES["runs-16k"], fetch(), handoffs)])

    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert (cells["GB/s"], cells["ms p50"], cells["p99"]) == (["5.44"], ["12.3"], ["1,234"])


def test_nothing_measured_is_an_empty_table() -> None:
    table, sentences, found = report([])

    assert (table.row_count, sentences, found["figures"]) == (0, [], [])
