"""Correction by observation: what is slower than predicted loses, and gets another chance."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbus.errors import LocalError
from kvbus.planning.cost import Rates, predict
from kvbus.planning.fetch_shape import ALL_PATHS, FetchShape, Path, PathWork
from kvbus.planning.observed import CURIOSITY, MAX_RATIO, PATIENCE, PeerRates

MIB = 1 << 20
SLOT_BYTES = 8 * MIB
BOTH = (Path.DIRECT, Path.PACKED)
SHAPE = {
    Path.DIRECT: PathWork(num_bytes=64 * MIB, num_descriptors=1024),
    Path.PACKED: PathWork(num_bytes=64 * MIB, gather_run_bytes=1024, scatter_run_bytes=1024),
}
RATIO = st.floats(1 / MAX_RATIO, MAX_RATIO)


def peer() -> PeerRates:
    return PeerRates(Rates(), slot_bytes=SLOT_BYTES)


def predicted_s(path: Path, shape: FetchShape = SHAPE) -> float:
    return predict(shape, path, Rates(), slot_bytes=SLOT_BYTES).seconds


def fetch(rates: PeerRates, truth_s: dict[Path, float], shape: FetchShape = SHAPE) -> Path:
    """One fetch by the path that is chosen, which takes what it really takes."""
    path = rates.choose(shape).path
    rates.observe(shape, path, seconds=truth_s[path])
    return path


def test_nothing_observed_means_the_prediction():
    rates = peer()

    choice = rates.choose(SHAPE)

    assert choice.path is Path.DIRECT
    assert [prediction.correction for prediction in choice.predictions] == [1.0, 1.0]


def test_a_path_that_keeps_being_slower_than_predicted_loses():
    rates, truth_s = peer(), {Path.DIRECT: 1.0, Path.PACKED: predicted_s(Path.PACKED)}

    taken = [fetch(rates, truth_s) for _ in range(20)]

    assert taken[0] is Path.DIRECT
    assert taken[-10:] == [Path.PACKED] * 10


def test_one_unlucky_fetch_does_not_exclude_a_path_for_good():
    rates = peer()
    truth_s = {path: predicted_s(path) for path in BOTH}
    rates.observe(SHAPE, Path.DIRECT, seconds=1000.0)

    ratio = rates.ratio(SHAPE, Path.DIRECT)
    taken = [fetch(rates, truth_s) for _ in range(10 * PATIENCE)]

    assert 1 < ratio < 4
    assert taken[0] is Path.PACKED
    assert taken[-PATIENCE:] == [Path.DIRECT] * PATIENCE


def test_a_path_that_is_better_than_predicted_is_found_though_nobody_was_told():
    nearly = {
        Path.DIRECT: PathWork(num_bytes=64 * MIB, num_descriptors=5000),
        Path.PACKED: SHAPE[Path.PACKED],
    }
    direct_s, packed_s = (predicted_s(path, nearly) for path in BOTH)
    rates, truth_s = peer(), {Path.DIRECT: direct_s, Path.PACKED: direct_s / 3}

    taken = [fetch(rates, truth_s, nearly) for _ in range(10 * PATIENCE)]

    assert direct_s < packed_s < 1.2 * direct_s
    assert taken[: PATIENCE + 1] == [Path.DIRECT] * (PATIENCE + 1)
    assert taken[-PATIENCE:] == [Path.PACKED] * PATIENCE


def test_a_path_that_stays_slow_is_tried_more_and_more_seldom():
    rates, truth_s = peer(), {Path.DIRECT: 0.5, Path.PACKED: predicted_s(Path.PACKED)}

    taken = [fetch(rates, truth_s) for _ in range(20_000)]

    tries = [index for index, path in enumerate(taken) if path is Path.DIRECT]
    gaps = [later - earlier for earlier, later in pairwise(tries) if later - earlier > 1]
    assert 3 <= len(gaps) <= 15
    assert gaps[0] >= PATIENCE
    assert gaps[-1] >= 16 * gaps[0]


def test_what_is_observed_all_the_time_is_not_forgotten():
    rates = peer()

    for _ in range(3000):
        rates.observe(SHAPE, Path.DIRECT, seconds=3 * predicted_s(Path.DIRECT))

    assert rates.ratio(SHAPE, Path.DIRECT) == pytest.approx(3)


def test_small_fetches_say_nothing_about_large_ones():
    rates = peer()
    small = {Path.DIRECT: PathWork(num_bytes=4096, num_descriptors=1)}

    for _ in range(10):
        rates.observe(small, Path.DIRECT, seconds=1.0)

    assert rates.ratio(small, Path.DIRECT) > 10
    assert rates.ratio(SHAPE, Path.DIRECT) == 1.0


def test_a_path_that_the_fetch_cannot_take_is_neither_observed_nor_chosen():
    rates = peer()

    with pytest.raises(LocalError):
        rates.observe(SHAPE, Path.REORDERED, seconds=1.0)
    with pytest.raises(LocalError):
        rates.choose(SHAPE, paths={Path.REORDERED})
    assert rates.choose(SHAPE, paths={Path.PACKED}).path is Path.PACKED


def test_a_fetch_of_nothing_teaches_nothing():
    rates, nothing = peer(), {Path.DIRECT: PathWork(num_bytes=0, num_descriptors=0)}

    rates.observe(nothing, Path.DIRECT, seconds=1.0)

    assert rates.ratio(nothing, Path.DIRECT) == 1.0


@given(RATIO, RATIO)
def test_after_enough_observations_the_choice_is_the_faster_path(direct, packed):
    truth_s = {
        Path.DIRECT: predicted_s(Path.DIRECT) * direct,
        Path.PACKED: predicted_s(Path.PACKED) * packed,
    }
    faster = min(BOTH, key=lambda path: truth_s[path])
    assume(max(truth_s.values()) > 1.2 * min(truth_s.values()))
    rates = peer()

    for _ in range(12):
        for path in BOTH:
            rates.observe(SHAPE, path, seconds=truth_s[path])

    assert rates.choose(SHAPE).path is faster


@given(RATIO, RATIO)
def test_left_to_itself_it_seldom_takes_the_slower_path(direct, packed):
    truth_s = {
        Path.DIRECT: predicted_s(Path.DIRECT) * direct,
        Path.PACKED: predicted_s(Path.PACKED) * packed,
    }
    faster, slower = sorted(BOTH, key=lambda path: truth_s[path])
    assume(truth_s[slower] > 1.2 * truth_s[faster])
    within_reach = predicted_s(faster) * CURIOSITY < 0.99 * truth_s[slower]
    assume(within_reach)
    rates = peer()

    for _ in range(500):
        fetch(rates, truth_s)
    taken = [fetch(rates, truth_s) for _ in range(500)]

    assert taken.count(slower) <= 500 / PATIENCE


@given(st.lists(st.tuples(st.sampled_from(BOTH), st.floats(-1, 1e9)), max_size=60))
def test_ratios_stay_within_their_bounds_and_repeat_exactly(observations):
    first, second = peer(), peer()

    for path, taken_s in observations:
        first.observe(SHAPE, path, seconds=taken_s)
        second.observe(SHAPE, path, seconds=taken_s)

    for path in ALL_PATHS:
        assert 1 / MAX_RATIO - 1e-12 <= first.ratio(SHAPE, path) <= MAX_RATIO + 1e-9
    assert first.choose(SHAPE) == second.choose(SHAPE)
