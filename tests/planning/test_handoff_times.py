"""What handoffs take: assumed, learned by size, and longer beside others."""

import random

import pytest

from kvbus.planning import HandoffTimes, queue_s

KIB, MIB = 1 << 10, 1 << 20


def truly_s(num_bytes: int) -> float:
    """A machine that is slower than assumed, the more so the longer a handoff is."""
    return 2e-3 + num_bytes / 4e9 + max(0, num_bytes - 8 * MIB) / 8e9


def learned(seed: int = 1, *, noise: float = 0.0, num: int = 300) -> HandoffTimes:
    times, chance = HandoffTimes(bytes_per_s=10e9), random.Random(seed)
    for _ in range(num):
        num_bytes = int(64 * KIB * 2 ** chance.uniform(0, 10))
        times.observe(num_bytes, truly_s(num_bytes) * chance.lognormvariate(0, noise))
    return times


def test_before_anything_was_seen_the_assumption_is_told() -> None:
    times = HandoffTimes(bytes_per_s=10e9, fixed_s=1e-3)

    assert times.predict_s(0) == pytest.approx(1e-3)
    assert times.predict_s(10 * 10**6) == pytest.approx(2e-3)
    assert times.num_observed == 0


@pytest.mark.parametrize("num_bytes", [64 * KIB, 100 * KIB, 3 * MIB, 10 * MIB, 40 * MIB])
def test_what_was_learned_is_near_the_truth_at_sizes_that_were_never_seen(num_bytes: int) -> None:
    times = learned()

    assert times.predict_s(num_bytes) == pytest.approx(truly_s(num_bytes), rel=0.1)


def test_nine_of_ten_predictions_are_within_a_quarter_where_times_vary_by_a_tenth() -> None:
    times, chance = learned(noise=0.1), random.Random(2)
    errors = []
    for _ in range(1000):
        num_bytes = int(64 * KIB * 2 ** chance.uniform(0, 10))
        took_s = truly_s(num_bytes) * chance.lognormvariate(0, 0.1)
        errors.append(abs(times.predict_s(num_bytes) - took_s) / took_s)

    assert sorted(errors)[900] <= 0.25


def test_one_size_corrects_all_others() -> None:
    times = HandoffTimes(bytes_per_s=10e9)
    before = times.predict_s(64 * MIB), times.predict_s(KIB)

    times.observe(MIB, 3 * times.predict_s(MIB))

    assert times.predict_s(64 * MIB) == pytest.approx(3 * before[0])
    assert times.predict_s(KIB) == pytest.approx(3 * before[1])


def test_a_link_that_becomes_slow_is_believed_soon() -> None:
    times = learned()
    for _ in range(10):
        times.observe(4 * MIB, 10 * truly_s(4 * MIB))

    assert times.predict_s(4 * MIB) > 5 * truly_s(4 * MIB)


def test_one_that_took_for_ever_or_nothing_is_bounded() -> None:
    times = HandoffTimes(bytes_per_s=10e9)
    assumed = times.predict_s(MIB)
    times.observe(MIB, 1e9)
    times.observe(0, 1.0)
    times.observe(MIB, 0.0)

    assert times.predict_s(MIB) == pytest.approx(100 * assumed)
    assert times.num_observed == 1


def test_beside_others_one_waits_for_as_many_bytes_of_each_or_for_all_that_are_ahead() -> None:
    times = HandoffTimes(bytes_per_s=1e9, fixed_s=1e-3)

    beside = queue_s(10**6, [(times, 10**9, False), (times, 10**5, False)])
    behind = queue_s(10**6, [(times, 10**9, True)])

    assert beside == pytest.approx(1e-3 + 1e-4, rel=0.01)
    assert behind == pytest.approx(1.0, rel=0.01)


def test_the_line_of_a_size_tells_what_handoffs_of_it_take() -> None:
    fixed_s, bytes_per_s = learned().line(64 * MIB)

    assert fixed_s + 64 * MIB / bytes_per_s == pytest.approx(truly_s(64 * MIB), rel=0.1)
