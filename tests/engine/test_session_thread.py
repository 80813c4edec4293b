"""A session in a thread of its own: calls from other threads, its loss, and the next one."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest

from kvbus.engine.thread import SessionThread
from kvbus.errors import ClosedError, KVBusError, PeerLost
from tests.agents import wait_until
from tests.engine.recording import RecordingDecode

GONE = PeerLost("the agent is gone")
WITHIN_S = 30.0


class Opener:
    """Opens sessions with nobody; each of ``failures`` is raised once, before one is opened."""

    def __init__(self, *failures: Exception) -> None:
        self.sessions: list[RecordingDecode] = []
        self._failures = list(failures)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RecordingDecode]:
        if self._failures:
            raise self._failures.pop(0)
        self.sessions.append(RecordingDecode())
        yield self.sessions[-1]


Threads = SessionThread[RecordingDecode]


@contextmanager
def session_thread(opener: Opener, *, reconnect: bool = True) -> Iterator[Threads]:
    thread = SessionThread("the session", opener.open, reconnect=reconnect)
    try:
        yield thread
    finally:
        thread.close()


def lose(thread: Threads) -> None:
    """The agent of the session goes; returns when it is missed."""
    session = thread.session
    assert session is not None
    thread.post(lambda _: session.lose(GONE))
    wait_until(lambda: thread.session is not session, "the session is missed")


async def where() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise GONE


def test_a_call_runs_in_the_sessions_thread_and_gives_what_it_returns_or_raises() -> None:
    with session_thread(Opener()) as thread:
        assert thread.start(where).result(WITHIN_S) == "kvbus-the session"
        with pytest.raises(PeerLost):
            thread.start(fail).result(WITHIN_S)
        assert thread.start(where).result(WITHIN_S) == "kvbus-the session"


def test_posts_are_made_in_their_order_with_the_session_that_there_is() -> None:
    seen: list[tuple[int, RecordingDecode | None]] = []
    with session_thread(Opener()) as thread:
        session = thread.wait_first()
        for number in range(100):
            thread.post(lambda given, number=number: seen.append((number, given)))
        thread.start(where).result(WITHIN_S)

    assert seen == [(number, session) for number in range(100)]


def test_a_call_that_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    with session_thread(Opener()) as thread:
        thread.post(lambda _: thread.spawn(fail))
        thread.post(lambda _: 1 // 0)
        thread.start(where).result(WITHIN_S)

        assert thread.start(where).result(WITHIN_S) == "kvbus-the session"
    assert GONE.message in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_lost_session_is_opened_again_and_handed_to_its_users() -> None:
    opener, users = Opener(), list[RecordingDecode]()
    with session_thread(opener) as thread:
        thread.wait_first()
        thread.when_open(users.append)
        lose(thread)
        assert thread.wait_open(WITHIN_S)

        assert users == opener.sessions[1:] == [thread.session]
        assert thread.problem is None


def test_while_there_is_no_session_the_reason_is_known_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [PeerLost("nobody listens") for _ in range(3)]
    with session_thread(Opener(*failures)) as thread:
        with pytest.raises(PeerLost, match="nobody listens"):
            thread.wait_first()
        assert thread.wait_open(WITHIN_S)

    assert caplog.text.count("cannot be opened: nobody listens") == 1


def test_a_fault_of_ours_does_not_end_the_thread() -> None:
    with session_thread(Opener(ValueError("a fault"))) as thread:
        assert thread.wait_open(WITHIN_S)


def test_who_did_not_ask_for_another_session_keeps_the_reason_and_the_thread() -> None:
    opener = Opener()
    with session_thread(opener, reconnect=False) as thread:
        thread.wait_first()
        lose(thread)

        assert thread.problem is GONE
        assert thread.start(where).result(WITHIN_S) == "kvbus-the session"
        assert len(opener.sessions) == 1


def test_what_still_runs_at_the_end_fails_and_so_does_what_comes_later() -> None:
    with session_thread(Opener()) as thread:
        runs = thread.start(anyio.sleep_forever)
        thread.start(where).result(WITHIN_S)

    with pytest.raises(ClosedError):
        runs.result(WITHIN_S)
    with pytest.raises(ClosedError):
        thread.start(where).result(WITHIN_S)


def test_an_opening_that_hangs_does_not_hold_up_the_end() -> None:
    @asynccontextmanager
    async def hang() -> AsyncIterator[RecordingDecode]:
        await anyio.sleep_forever()
        yield RecordingDecode()

    thread = SessionThread("the session", hang, reconnect=True)
    problem = thread.problem
    thread.close()

    assert isinstance(problem, KVBusError)
