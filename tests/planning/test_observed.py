"""Correction by observation: what is slower than predicted loses, and gets another chance."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbus.errors import LocalError
from kvbus.planning import (
    ALL_PATHS,
    CURIOSITY,
    MAX_RATIO,
    PATIENCE,
    FetchShape,
    Overlaps,
    Path,
    PathWork,
    PeerRates,
    Rates,
    predict,
)

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


def test_nothing_observed_means_the_prediction() -> None:
    rates = peer()

    choice = rates.choose(SHAPE)

    assert choice.path is Path.DIRECT
    assert [prediction.correction for prediction in choice.predictions] == [1.0, 1.0]


def test_one_unlucky_fetch_does_not_exclude_a_path_for_good() -> None:
    rates = peer()
    truth_s = {path: predicted_s(path) for path in BOTH}
    rates.observe(SHAPE, Path.DIRECT, seconds=1000.0)

    ratio = rates.ratio(SHAPE, Path.DIRECT)
    taken = [fetch(rates, truth_s) for _ in range(10 * PATIENCE)]

    assert 1 < ratio < 4
    assert taken[0] is Path.PACKED
    assert taken[-PATIENCE:] == [Path.DIRECT] * PATIENCE


def test_a_path_that_is_better_than_predicted_is_found_though_nobody_was_told() -> None:
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


def test_a_path_that_stays_slow_is_tried_more_and_more_seldom() -> None:
    rates, truth_s = peer(), {Path.DIRECT: 0.5, Path.PACKED: predicted_s(Path.PACKED)}

    taken = [fetch(rates, truth_s) for _ in range(6000)]

    tries = [index for index, path in enumerate(taken) if path is Path.DIRECT]
    gaps = [later - earlier for earlier, later in pairwise(tries) if later - earlier > 1]
    assert 3 <= len(gaps) <= 15
    assert gaps[0] >= PATIENCE
    assert gaps[-1] >= 16 * gaps[0]


def test_small_fetches_say_nothing_about_large_ones() -> None:
    rates = peer()
    small = {Path.DIRECT: PathWork(num_bytes=4096, num_descriptors=1)}

    for _ in range(10):
        rates.observe(small, Path.DIRECT, seconds=1.0)

    assert rates.ratio(small, Path.DIRECT) > 10
    assert rates.ratio(SHAPE, Path.DIRECT) == 1.0


def test_a_path_that_the_fetch_cannot_take_is_neither_observed_nor_chosen() -> None:
    rates = peer()

    with pytest.raises(LocalError):
        rates.observe(SHAPE, Path.REORDERED, seconds=1.0)
    with pytest.raises(LocalError):
        rates.choose(SHAPE, paths={Path.REORDERED})
    assert rates.choose(SHAPE, paths={Path.PACKED}).path is Path.PACKED


def test_a_fetch_of_nothing_teaches_nothing() -> None:
    rates, nothing = peer(), {Path.DIRECT: PathWork(num_bytes=0, num_descriptors=0)}

    rates.observe(nothing, Path.DIRECT, seconds=1.0)

    assert rates.ratio(nothing, Path.DIRECT) == 1.0


@given(RATIO, RATIO)
def test_after_enough_observations_the_choice_is_the_faster_path(
    direct: float, packed: float
) -> None:
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
def test_left_to_itself_it_seldom_takes_the_slower_path(direct: float, packed: float) -> None:
    truth_s = {
        Path.DIRECT: predicted_s(Path.DIRECT) * direct,
        Path.PACKED: predicted_s(Path.PACKED) * packed,
    }
    faster, slower = sorted(BOTH, key=lambda path: truth_s[path])
    assume(truth_s[slower] > 1.2 * truth_s[faster])
    within_reach = predicted_s(faster) * CURIOSITY < 0.99 * truth_s[slower]
    assume(within_reach)
    rates = peer()

    for _ in range(10 * PATIENCE):
        fetch(rates, truth_s)
    taken = [fetch(rates, truth_s) for _ in range(10 * PATIENCE)]

    assert taken.count(slower) <= 10


class BusyMachine:
    """Fetches share one machine: each gets as much of it as the others do."""

    def __init__(self, rates: PeerRates, truth_s: dict[Path, float]) -> None:
        self.rates, self.truth_s, self.overlaps, self.now = rates, truth_s, Overlaps(), 0.0
        self.running: dict[int, tuple[Path, float, float]] = {}
        self.num_begun = 0
        self.learned: list[tuple[Path, float]] = []

    def begin(self, path: Path) -> None:
        self.num_begun += 1
        self.running[self.num_begun] = path, self.now, self.truth_s[path]
        self.overlaps.begin(self.num_begun)

    def end_one(self) -> None:
        """Let time pass until the first that goes on has ended."""
        num = len(self.running)
        key = min(self.running, key=lambda one: self.running[one][2])
        path, began, left_s = self.running.pop(key)
        self.now += left_s * num
        self.running = {one: (p, at, s - left_s) for one, (p, at, s) in self.running.items()}
        if self.overlaps.end(key):
            self.learned.append((path, self.now - began))
            self.rates.observe(SHAPE, path, seconds=self.now - began)


@given(RATIO, RATIO, st.lists(st.sampled_from([*BOTH, None]), max_size=80))
def test_a_path_is_not_punished_for_what_ran_beside_it(
    direct: float, packed: float, steps: list[Path | None]
) -> None:
    truth_s = {
        Path.DIRECT: predicted_s(Path.DIRECT) * direct,
        Path.PACKED: predicted_s(Path.PACKED) * packed,
    }
    machine = BusyMachine(peer(), truth_s)

    for path in steps:
        if path is not None:
            machine.begin(path)
        elif machine.running:
            machine.end_one()

    for path, seconds in machine.learned:
        assert seconds == pytest.approx(truth_s[path])
    for path, truth in zip(BOTH, (direct, packed), strict=True):
        assert machine.rates.ratio(SHAPE, path) <= max(1.0, truth) * 1.001


@given(st.lists(st.tuples(st.sampled_from(BOTH), st.floats(-1, 1e9)), max_size=60))
def test_ratios_stay_within_their_bounds_and_repeat_exactly(
    observations: list[tuple[Path, float]],
) -> None:
    first, second = peer(), peer()

    for path, taken_s in observations:
        first.observe(SHAPE, path, seconds=taken_s)
        second.observe(SHAPE, path, seconds=taken_s)

    for path in ALL_PATHS:
        assert 1 / MAX_RATIO - 1e-12 <= first.ratio(SHAPE, path) <= MAX_RATIO + 1e-9
    assert first.choose(SHAPE) == second.choose(SHAPE)


REPLICAS = {
    Path.DIRECT: PathWork(num_bytes=8 * 64 * MIB, num_descriptors=4096),
    Path.PACKED: PathWork(
        num_bytes=64 * MIB, gather_run_bytes=131_072, scatter_run_bytes=131_072, num_copies=8
    ),
}
"""A latent for 8 ranks, in long runs."""


def far_peer() -> PeerRates:
    return PeerRates(Rates(), slot_bytes=SLOT_BYTES, far=True)


def reads(rates: PeerRates, bytes_per_s: float, num_bytes: int = 8 * MIB) -> None:
    """One READ of one descriptor, over a wire of that rate."""
    fixed_s = rates.rates.seconds_per_read + rates.rates.seconds_per_descriptor
    seconds = fixed_s + num_bytes / bytes_per_s
    rates.observe_read(num_bytes=num_bytes, num_descriptors=1, seconds=seconds)


def test_the_first_fetch_from_another_machine_reads_once_what_ranks_hold_alike() -> None:
    near, far = peer().choose(REPLICAS), far_peer().choose(REPLICAS)

    assert (near.path, far.path) == (Path.DIRECT, Path.PACKED)


@pytest.mark.parametrize(
    ("bytes_per_s", "path"), [(40e9, Path.DIRECT), (0.125e9, Path.PACKED)], ids=["fast", "slow"]
)
def test_one_read_of_a_box_shows_how_fast_the_wire_is(bytes_per_s: float, path: Path) -> None:
    rates = far_peer()

    reads(rates, bytes_per_s)

    assert rates.rates.wire_bytes_per_s == pytest.approx(bytes_per_s)
    assert rates.choose(REPLICAS).path is path


def test_reads_that_wait_for_others_do_not_make_the_wire_slower() -> None:
    rates = far_peer()

    for bytes_per_s in (1e9, 10e9, 2e9, 9e9, 1e9):
        reads(rates, bytes_per_s)

    assert rates.rates.wire_bytes_per_s == pytest.approx(10e9)


def test_short_reads_and_peers_of_this_machine_show_nothing_of_the_wire() -> None:
    near, far = peer(), far_peer()

    reads(near, 1e9)
    reads(far, 1e9, num_bytes=MIB - 1)

    assert near.rates == Rates()
    assert far.rates == PeerRates(Rates(), slot_bytes=SLOT_BYTES, far=True).rates


def test_corrections_of_a_wire_that_was_assumed_are_forgotten() -> None:
    rates = far_peer()
    rates.observe(REPLICAS, Path.PACKED, seconds=1.0)

    reads(rates, 20e9)

    assert rates.ratio(REPLICAS, Path.PACKED) == 1.0


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20), st.floats(1e-9, 1e6))
def test_whatever_a_read_took_the_wire_has_a_rate(
    num_bytes: int, num_descriptors: int, seconds: float
) -> None:
    rates = far_peer()

    rates.observe_read(num_bytes=num_bytes, num_descriptors=num_descriptors, seconds=seconds)

    assert 0 < rates.rates.wire_bytes_per_s <= max(8.5e9, 4 * num_bytes / seconds)
