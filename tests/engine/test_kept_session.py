"""A session that is kept: begun, resumed after a loss, replaced without a gap; also in a thread."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import anyio
import pytest

from kvbus.engine import KeptSession, SessionThread
from kvbus.errors import ClosedError, KVBusError, PeerLost
from tests.agents import until, wait_until
from tests.engine.recording import RecordingDecode

GONE = PeerLost("the agent is gone")
WITHIN_S = 30.0


class Resumable(RecordingDecode):
    def __init__(self, sessions: "Sessions") -> None:
        super().__init__()
        self._sessions = sessions
        self.is_settled = anyio.Event()

    async def settled(self) -> None:
        await self.is_settled.wait()

    async def resume(self, before: RecordingDecode) -> None:
        self._sessions.resumed.append((before, self))
        if self._sessions.failures:
            raise self._sessions.failures.pop(0)


class Sessions:
    """Opens sessions with nobody, and keeps what was done with them; ``failures`` come first."""

    def __init__(self, *failures: Exception) -> None:
        self.all: list[Resumable] = []
        self.begun: list[RecordingDecode] = []
        self.resumed: list[tuple[RecordingDecode, RecordingDecode]] = []
        self.closed: list[RecordingDecode] = []
        self.failures = list(failures)
        self.keeper = KeptSession[RecordingDecode](self.open, begin=self.begin)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Resumable]:
        self.all.append(session := Resumable(self))
        try:
            yield session
        finally:
            self.closed.append(session)

    async def begin(self, session: RecordingDecode) -> None:
        assert self.keeper.session is None, "it is not there before it can be used"
        self.begun.append(session)
        if self.failures:
            raise self.failures.pop(0)

    async def opened(self) -> Resumable:
        session = await self.keeper.opened()
        assert isinstance(session, Resumable)
        return session


@asynccontextmanager
async def keeping(
    *failures: Exception,
) -> AsyncIterator[tuple[Sessions, KeptSession[RecordingDecode], Resumable]]:
    """Sessions, who keeps one, and the first that can be used."""
    sessions = Sessions(*failures)
    async with sessions.keeper:
        with anyio.fail_after(WITHIN_S):
            yield sessions, sessions.keeper, await sessions.opened()


@pytest.mark.anyio
async def test_the_first_session_is_begun_and_each_one_after_a_loss_resumes_the_one_before() -> (
    None
):
    async with keeping() as (sessions, keeper, first):
        first.lose(GONE)
        assert keeper.session is None
        second = await sessions.opened()
        second.lose(GONE)
        third = await sessions.opened()

        assert sessions.begun == [first]
        assert sessions.resumed == [(first, second), (second, third)]
        assert sessions.closed == [first, second]
        assert keeper.num_opened == 3


@pytest.mark.anyio
async def test_what_cannot_be_begun_or_resumed_is_tried_with_the_next_session() -> None:
    async with keeping(PeerLost("not yet")) as (sessions, _, first):
        sessions.failures.append(PeerLost("gone again"))
        first.lose(GONE)
        last = await sessions.opened()

        assert sessions.begun == [sessions.all[0], first]
        assert [before for before, _ in sessions.resumed] == [first, first]
        assert sessions.closed == sessions.all[:-1]
        assert last is sessions.all[-1]


@pytest.mark.anyio
async def test_while_there_is_none_the_latest_one_says_why() -> None:
    with pytest.raises(ClosedError):
        _ = Sessions().keeper.latest
    async with keeping() as (sessions, keeper, first):
        sessions.failures.extend(PeerLost("nobody listens") for _ in range(3))
        assert keeper.problem is None
        first.lose(GONE)

        assert keeper.problem is GONE
        assert keeper.latest is first
        assert keeper.latest.lost is GONE
        assert await sessions.opened() is not first


@pytest.mark.anyio
async def test_the_session_of_an_agent_that_is_replaced_stays_until_that_agent_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with keeping() as (sessions, keeper, old):
        sessions.failures.append(PeerLost("the next one does not listen yet"))
        old.note_replaced()
        await until(lambda: len(sessions.resumed) == 1)
        assert keeper.session is old
        await until(lambda: keeper.session is not old)

        new = keeper.session
        assert sessions.resumed[-1] == (old, new)
        assert old not in sessions.closed
        old.lose(GONE)
        await until(lambda: old in sessions.closed)

        assert keeper.session is new
        assert keeper.problem is None
        assert keeper.num_opened == 2
        assert "the session lost" not in caplog.text


@pytest.mark.anyio
async def test_the_session_of_an_agent_that_is_replaced_is_closed_when_it_is_settled() -> None:
    async with keeping() as (sessions, keeper, old):
        old.is_settled.set()
        sessions.failures.append(PeerLost("the next one does not listen yet"))
        old.note_replaced()
        await until(lambda: len(sessions.resumed) == 1)
        assert old not in sessions.closed
        await until(lambda: old in sessions.closed)

        assert keeper.session is sessions.all[-1]
        assert keeper.problem is None


@pytest.mark.anyio
async def test_the_session_before_is_used_again_when_the_next_one_is_lost() -> None:
    async with keeping() as (sessions, keeper, old):
        old.note_replaced()
        await until(lambda: keeper.session is not old)
        new = await sessions.opened()
        new.lose(GONE)
        await until(lambda: keeper.session is old)
        assert keeper.latest is old
        assert sessions.all == [old, new]

        old.note_replaced()
        old.is_settled.set()
        await until(lambda: old in sessions.closed)
        assert keeper.session is sessions.all[-1]
        assert sessions.resumed == [(old, new), (old, sessions.all[-1])]


@pytest.mark.anyio
async def test_an_old_agent_that_ends_before_the_next_one_is_there_is_a_loss_like_any() -> None:
    async with keeping() as (sessions, keeper, old):
        sessions.failures.extend(PeerLost("not yet") for _ in range(3))
        old.note_replaced()
        old.lose(GONE)
        new = await sessions.opened()

        assert sessions.resumed[-1] == (old, new)
        assert keeper.num_opened == 2


@pytest.mark.anyio
async def test_leaving_closes_the_session_and_hands_on_what_was_raised() -> None:
    async def fail_inside() -> None:
        async with keeping() as (sessions, _, __):
            all_sessions.append(sessions)
            raise ValueError("a fault of the engine")

    all_sessions: list[Sessions] = []
    with pytest.raises(ValueError, match="of the engine"):
        await fail_inside()

    (sessions,) = all_sessions
    assert sessions.closed == sessions.all
    assert sessions.keeper.session is None
    assert isinstance(sessions.keeper.problem, ClosedError)


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


def divide(_: object) -> None:
    1 // 0  # noqa: B018 - it raises


def test_calls_run_in_the_sessions_thread_and_one_that_fails_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[int, RecordingDecode | None]] = []
    with session_thread(Opener()) as thread:
        session = thread.wait_first()
        for number in range(100):
            thread.post(partial(lambda number, given: seen.append((number, given)), number))
        with pytest.raises(PeerLost):
            thread.start(fail).result(WITHIN_S)
        thread.post(lambda _: thread.spawn(fail))
        thread.post(divide)
        thread.start(where).result(WITHIN_S)

        assert thread.start(where).result(WITHIN_S) == "kvbus-the session"
    assert seen == [(number, session) for number in range(100)]
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
    """A fault of ours is such a reason, too, and does not end the thread."""
    failures = [PeerLost("nobody listens") for _ in range(3)]
    with session_thread(Opener(*failures, ValueError("a fault"))) as thread:
        with pytest.raises(PeerLost, match="nobody listens"):
            thread.wait_first()
        assert thread.wait_open(WITHIN_S)

    assert caplog.text.count("cannot be opened: nobody listens") == 1


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

    for call in (lambda: runs, lambda: thread.start(where)):
        with pytest.raises(ClosedError):
            call().result(WITHIN_S)


def test_an_opening_that_hangs_does_not_hold_up_the_end() -> None:
    @asynccontextmanager
    async def hang() -> AsyncIterator[RecordingDecode]:
        await anyio.sleep_forever()
        yield RecordingDecode()

    thread = SessionThread("the session", hang, reconnect=True)
    problem = thread.problem
    thread.close()

    assert isinstance(problem, KVBusError)
