"""What fetches take is learned as a fixed time and a rate."""

from random import Random

import pytest

from kvbus.planning import Learned

KIB, MIB = 1 << 10, 1 << 20


def truly_s(num_bytes: int) -> float:
    """A machine that is slower than assumed."""
    return 3e-3 + num_bytes / 3e9


@pytest.mark.parametrize("num_bytes", [64 * KIB, 3 * MIB, 64 * MIB])
def test_what_was_learned_is_near_the_truth_and_a_link_that_becomes_slow_is_believed_soon(
    num_bytes: int,
) -> None:
    learned, random = Learned(), Random(1)
    for _ in range(300):
        size = int(64 * KIB * 2 ** random.uniform(0, 10))
        learned.observe(size, truly_s(size) * random.lognormvariate(0, 0.05))
    predicted_s = learned.predict_s(num_bytes)
    for _ in range(10):
        learned.observe(num_bytes, 10 * truly_s(num_bytes))

    assert predicted_s == pytest.approx(truly_s(num_bytes), rel=0.15)
    assert learned.predict_s(num_bytes) > 5 * truly_s(num_bytes)


def test_one_fetch_is_believed_within_bounds_and_nothing_in_no_time_says_nothing() -> None:
    learned, bounded = Learned(), Learned()
    before_s = learned.predict_s(64 * MIB)

    learned.observe(64 * MIB, 3 * before_s)
    for num_bytes, seconds in ((64 * MIB, 1e9), (0, 1.0), (64 * MIB, 0.0)):
        bounded.observe(num_bytes, seconds)

    assert learned.predict_s(64 * MIB) == pytest.approx(3 * before_s, rel=0.1)
    assert bounded.predict_s(64 * MIB) <= 100 * before_s
    assert bounded.num_observed == 1
