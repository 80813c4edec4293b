"""A peer that does not answer is asked less and less, and good again at the first sign of life."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, RemoteError
from kvbus_decode.peer.reach import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    NUM_TIMEOUTS,
    TRIAL_S,
    Reach,
    ReachState,
)
from kvbus_decode.peer.reach_book import LEAST_S, ReachBook

TIMEOUT_S = 5.0


@dataclass
class Out:
    """Requests of ``asked_at`` have no answer at ``now``."""

    asked_at: float = 0.0
    now: float = TIMEOUT_S
    times: int = NUM_TIMEOUTS


@dataclass
class Heard:
    at: float


@dataclass
class Asks:
    """Somebody wants to ask, and has to wait so long."""

    now: float
    wait_s: float = 0.0


def play(*steps: Out | Heard | Asks, jitter: float = 1.0) -> Reach:
    reach = Reach()
    for step in steps:
        match step:
            case Out(asked_at, now, times):
                for _ in range(times):
                    reach.time_out(asked_at, now, jitter=jitter)
            case Heard(at):
                reach.hear(at)
            case Asks(now, wait_s):
                assert reach.admit(now) == wait_s, step
    return reach


TRIED_AT = TIMEOUT_S + FIRST_PAUSE_S
# fmt: off
SCRIPTS: dict[str, list[Out | Heard | Asks]] = {
    "it is asked until so many requests in a row had no answer":
        [Out(times=NUM_TIMEOUTS - 1), Asks(5), Out(times=1), Asks(5, FIRST_PAUSE_S)],
    "an answer between two timeouts counts from the start":
        [Out(times=NUM_TIMEOUTS - 1), Heard(5), Out(6, 11, 1), Asks(11)],
    "a request during which it was heard is no sign of silence":
        [Heard(3), Out(), Asks(5)],
    "what was heard before is no news":
        [Heard(1), Out(2, 7), Heard(1), Asks(7, FIRST_PAUSE_S)],
    "after the pause one may ask and the others wait for what comes of it":
        [Out(), Asks(5.5, 0.5), Asks(TRIED_AT), Asks(TRIED_AT, TRIAL_S), Asks(TRIED_AT, TRIAL_S)],
    "a trial that nobody ended is followed by another":
        [Out(), Asks(TRIED_AT), Asks(TRIED_AT + TRIAL_S)],
    "one sign of life makes it good at once and its pauses short again":
        [Out(), Asks(TRIED_AT), Out(TRIED_AT, 15, 1), Heard(16), Asks(16), Out(17, 25),
         Asks(25, FIRST_PAUSE_S)],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_when_a_peer_may_be_asked(script: list[Out | Heard | Asks]) -> None:
    play(*script)


@pytest.mark.parametrize(("jitter", "pause_s"), [(0.0, 0.5), (1.0, 1.0)])
def test_jitter_shortens_a_pause_by_half_at_most(jitter: float, pause_s: float) -> None:
    play(Out(), Asks(TIMEOUT_S, pause_s), jitter=jitter)


def test_each_trial_without_an_answer_doubles_the_pause_up_to_a_bound() -> None:
    reach, pauses = play(Out()), []
    for _ in range(8):
        now = reach.next_at
        assert reach.admit(now) == 0.0
        reach.time_out(now, now + TIMEOUT_S, jitter=1.0)
        pauses.append(reach.next_at - now - TIMEOUT_S)

    assert pauses == [2.0, 4.0, 8.0, 16.0] + [LONGEST_PAUSE_S] * 4


def test_a_process_is_new_when_another_was_asked_or_heard_of_before_it() -> None:
    known, silent = Reach(boot="a"), play(Out())

    assert (known.is_new("a"), known.is_new("b")) == (False, True)
    assert (silent.is_new("a"), silent.is_new("a"), silent.is_new("b")) == (False, False, True)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0.01, 20)),
        st.tuples(st.just("time out"), st.floats(0, 1)),
        st.tuples(st.just("hear"), st.floats(0, 3)),
        st.tuples(st.just("ask"), st.just(0.0)),
    ),
    max_size=60,
)


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


WHERE = "tcp://10.0.0.1:5750"


@dataclass
class Connection:
    """What a connection knows of its other side."""

    peer_boot: str | None
    heard_at: float


Silent = tuple[ReachBook, Connection]


@pytest.fixture(params=["a", None], ids=["met before", "never met"])
async def silent(request: pytest.FixtureRequest) -> Silent:
    """An agent whose process ``a`` does not answer."""
    loop = asyncio.get_running_loop()
    connection = Connection(request.param, heard_at=loop.time() - 100)
    book = ReachBook(loop, max_known=4)
    leave_unanswered(book, connection, "a")
    return book, connection


def leave_unanswered(book: ReachBook, connection: Connection, boot: str) -> None:
    for _ in range(NUM_TIMEOUTS):
        assert book.admit(WHERE, connection, WHERE, boot)
        asked_at = asyncio.get_running_loop().time() - LEAST_S
        book.note_timeout(WHERE, connection, asked_at, WHERE)
    with pytest.raises(RemoteError) as refused:
        book.admit(WHERE, connection, WHERE, boot)
    assert refused.value.code is ErrorCode.PEER_UNREACHABLE


@pytest.mark.anyio
async def test_fetches_that_are_refused_count_until_the_agent_is_heard(silent: Silent) -> None:
    book, connection = silent
    for boot in ("a", None):
        with pytest.raises(RemoteError):
            book.admit(WHERE, connection, WHERE, boot)
    before = book.num_refused
    connection.peer_boot, connection.heard_at = "a", asyncio.get_running_loop().time()

    assert book.retry_s(WHERE, connection) is None
    assert (before, book.num_refused) == (3, 0)


@pytest.mark.anyio
async def test_a_ticket_of_a_new_process_of_a_silent_agent_is_read_at_once(silent: Silent) -> None:
    book, connection = silent

    answers = book.admit(WHERE, connection, WHERE, "b")

    assert answers
    assert book.retry_s(WHERE, connection) is None
    leave_unanswered(book, connection, "b")
