"""A peer that does not answer is asked less and less, and good again at the first sign of life."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus_decode.peer.reach import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NUM_TIMEOUTS,
    TRIAL_S,
    Reach,
    ReachState,
)

TIMEOUT_S = 5.0
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0.01, 20)),
        st.tuples(st.just("time out"), st.floats(0, 1)),
        st.tuples(st.just("hear"), st.floats(0, 3)),
        st.tuples(st.just("ask"), st.just(0.0)),
    ),
    max_size=60,
)


def silent(*, jitter: float = 1.0) -> tuple[Reach, float]:
    """A peer that has left the requests of 0 s unanswered, and the time."""
    reach = Reach()
    for _ in range(NUM_TIMEOUTS):
        reach.time_out(0.0, TIMEOUT_S, jitter=jitter)
    return reach, TIMEOUT_S


def test_a_peer_is_asked_until_so_many_requests_in_a_row_had_no_answer() -> None:
    reach = Reach()

    admitted = []
    for _ in range(NUM_TIMEOUTS):
        admitted.append(reach.admit(TIMEOUT_S))
        reach.time_out(0.0, TIMEOUT_S, jitter=1.0)

    assert admitted == [0.0] * NUM_TIMEOUTS
    assert reach.admit(TIMEOUT_S) == FIRST_PAUSE_S


def test_an_answer_between_two_timeouts_counts_from_the_start() -> None:
    reach = Reach()

    for _ in range(NUM_TIMEOUTS - 1):
        reach.time_out(0.0, TIMEOUT_S, jitter=1.0)
    reach.hear(TIMEOUT_S)
    reach.time_out(TIMEOUT_S + 1, TIMEOUT_S + 6, jitter=1.0)

    assert reach.state is ReachState.ANSWERING


def test_a_process_is_new_when_another_was_asked_before_it() -> None:
    reach = Reach(boot="a")

    assert (reach.is_new("a"), reach.is_new("b")) == (False, True)


def test_the_first_process_that_is_heard_of_is_the_one_that_was_asked() -> None:
    reach, _ = silent()

    assert (reach.is_new("a"), reach.is_new("a"), reach.is_new("b")) == (False, False, True)


def test_a_request_during_which_the_peer_was_heard_is_no_sign_of_silence() -> None:
    reach = Reach()
    reach.hear(3.0)

    for _ in range(NUM_TIMEOUTS):
        reach.time_out(0.0, TIMEOUT_S, jitter=1.0)

    assert reach.state is ReachState.ANSWERING


def test_after_the_pause_one_may_ask_and_the_others_wait_for_what_comes_of_it() -> None:
    reach, now = silent()

    early, trial = reach.admit(now + 0.5), reach.admit(now + FIRST_PAUSE_S)
    others = [reach.admit(now + FIRST_PAUSE_S) for _ in range(3)]

    assert (early, trial) == (0.5, 0.0)
    assert others == [TRIAL_S] * 3


def test_each_trial_without_an_answer_doubles_the_pause_up_to_a_bound() -> None:
    reach, now = silent()

    pauses = []
    for _ in range(8):
        now = reach.next_at
        assert reach.admit(now) == 0.0
        reach.time_out(now, now + TIMEOUT_S, jitter=1.0)
        now += TIMEOUT_S
        pauses.append(reach.next_at - now)

    assert pauses == [2.0, 4.0, 8.0, 16.0] + [LONGEST_PAUSE_S] * 4


def test_one_sign_of_life_makes_it_good_at_once_and_its_pauses_short_again() -> None:
    reach, now = silent()
    reach.admit(now + FIRST_PAUSE_S)
    reach.time_out(now + FIRST_PAUSE_S, now + 10, jitter=1.0)

    reach.hear(now + 11)
    admitted = reach.admit(now + 11)
    for _ in range(NUM_TIMEOUTS):
        reach.time_out(now + 12, now + 20, jitter=1.0)

    assert admitted == 0.0
    assert reach.admit(now + 20) == FIRST_PAUSE_S


def test_a_trial_that_nobody_ended_is_followed_by_another() -> None:
    reach, now = silent()
    reach.admit(now + FIRST_PAUSE_S)

    assert reach.admit(now + FIRST_PAUSE_S + TRIAL_S) == 0.0


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 0.5), (1.0, 1.0)])
def test_jitter_shortens_a_pause_by_half_at_most(jitter: float, pause_s: float) -> None:
    reach, now = silent(jitter=jitter)

    assert reach.admit(now) == pause_s


@given(STEPS)
def test_whatever_happens_somebody_may_ask_soon_and_a_sign_of_life_is_believed(
    steps: list[tuple[str, float]],
) -> None:
    reach, now, asked_at, heard_at = Reach(), 0.0, [0.0], float("-inf")
    for what, amount in steps:
        before = reach.state
        match what:
            case "wait":
                now += amount
            case "time out":
                reach.time_out(asked_at[-1], now, jitter=amount)
            case "hear":
                heard_at = max(heard_at, now - amount)
                reach.hear(now - amount)
            case "ask":
                wait_s = reach.admit(now)
                assert 0 <= wait_s <= max(LONGEST_PAUSE_S, TRIAL_S)
                if not wait_s:
                    asked_at.append(now)
                if before is ReachState.TRIED and not wait_s:
                    assert now - asked_at[-2] >= TRIAL_S, "two at once"
        if reach.state is not ReachState.ANSWERING:
            assert reach.heard_at == heard_at
            assert reach.num_timeouts >= NUM_TIMEOUTS
    reach.hear(now + 0.001)
    assert reach.admit(now + 0.001) == 0.0


def test_what_was_heard_before_is_no_news() -> None:
    reach = Reach()
    reach.hear(1.0)
    for _ in range(NUM_TIMEOUTS):
        reach.time_out(2.0, 7.0, jitter=1.0)

    reach.hear(1.0)

    assert reach.state is ReachState.SILENT
