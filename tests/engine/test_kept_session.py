"""A session that is kept: begun once, resumed after each loss, and replaced without a gap."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvbus.engine import KeptSession
from kvbus.errors import ClosedError, PeerLost
from tests.agents import until
from tests.engine.recording import RecordingDecode

pytestmark = pytest.mark.anyio

GONE = PeerLost("the agent is gone")
WITHIN_S = 30.0


class Sessions:
    """Opens sessions with nobody, and keeps what was done with them; ``failures`` come first."""

    def __init__(self, *failures: Exception) -> None:
        self.all: list[RecordingDecode] = []
        self.begun: list[RecordingDecode] = []
        self.resumed: list[tuple[RecordingDecode, RecordingDecode]] = []
        self.closed: list[RecordingDecode] = []
        self.failures = list(failures)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RecordingDecode]:
        self.all.append(session := Resumable(self))
        try:
            yield session
        finally:
            self.closed.append(session)

    async def begin(self, session: RecordingDecode) -> None:
        self.begun.append(session)
        if self.failures:
            raise self.failures.pop(0)


class Resumable(RecordingDecode):
    def __init__(self, sessions: Sessions) -> None:
        super().__init__()
        self._sessions = sessions
        self.is_settled = anyio.Event()

    async def settled(self) -> None:
        await self.is_settled.wait()

    async def resume(self, before: RecordingDecode) -> None:
        self._sessions.resumed.append((before, self))
        if self._sessions.failures:
            raise self._sessions.failures.pop(0)


def kept(sessions: Sessions) -> KeptSession[RecordingDecode]:
    return KeptSession(sessions.open, begin=sessions.begin)


async def test_the_first_session_is_begun_and_each_one_after_a_loss_resumes_the_one_before() -> (
    None
):
    sessions = Sessions()
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            first = await keeper.opened()
            first.lose(GONE)
            assert keeper.session is None
            second = await keeper.opened()
            second.lose(GONE)
            third = await keeper.opened()

        assert sessions.begun == [first]
        assert sessions.resumed == [(first, second), (second, third)]
        assert sessions.closed == [first, second]
        assert keeper.num_opened == 3


async def test_a_session_is_not_there_before_it_can_be_used() -> None:
    sessions = Sessions()
    seen: list[RecordingDecode | None] = []

    async def begin(session: RecordingDecode) -> None:
        seen.append(keeper.session)
        await sessions.begin(session)

    keeper = KeptSession(sessions.open, begin=begin)
    with pytest.raises(ClosedError):
        _ = keeper.latest
    async with keeper:
        with anyio.fail_after(WITHIN_S):
            await keeper.opened()

    assert seen == [None]


async def test_what_cannot_be_begun_or_resumed_is_tried_with_the_next_session() -> None:
    sessions = Sessions(PeerLost("not yet"))
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            first = await keeper.opened()
            sessions.failures.append(PeerLost("gone again"))
            first.lose(GONE)
            last = await keeper.opened()

        assert sessions.begun == [sessions.all[0], first]
        assert [before for before, _ in sessions.resumed] == [first, first]
        assert sessions.closed == sessions.all[:-1]
        assert last is sessions.all[-1]


async def test_while_there_is_none_the_latest_one_says_why() -> None:
    sessions = Sessions()
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            first = await keeper.opened()
            sessions.failures.extend(PeerLost("nobody listens") for _ in range(3))
            assert keeper.problem is None
            first.lose(GONE)

            assert keeper.problem is GONE
            assert keeper.latest is first
            assert keeper.latest.lost is GONE
            assert await keeper.opened() is not first


async def test_the_session_of_an_agent_that_is_replaced_stays_until_that_agent_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sessions = Sessions()
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            old = await keeper.opened()
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


async def test_the_session_of_an_agent_that_is_replaced_is_closed_when_it_is_settled() -> None:
    sessions = Sessions()
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            old = await keeper.opened()
            old.is_settled.set()
            sessions.failures.append(PeerLost("the next one does not listen yet"))
            old.note_replaced()
            await until(lambda: len(sessions.resumed) == 1)
            assert old not in sessions.closed
            await until(lambda: old in sessions.closed)

            assert keeper.session is sessions.all[-1]
            assert keeper.problem is None


async def test_the_session_before_is_used_again_when_the_next_one_is_lost() -> None:
    sessions = Sessions()
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            old = await keeper.opened()
            old.note_replaced()
            await until(lambda: keeper.session is not old)
            new = await keeper.opened()
            new.lose(GONE)
            await until(lambda: keeper.session is old)
            assert keeper.latest is old
            assert sessions.all == [old, new]

            old.note_replaced()
            old.is_settled.set()
            await until(lambda: old in sessions.closed)
            assert keeper.session is sessions.all[-1]
            assert sessions.resumed == [(old, new), (old, sessions.all[-1])]


async def test_an_old_agent_that_ends_before_the_next_one_is_there_is_a_loss_like_any() -> None:
    sessions = Sessions()
    async with kept(sessions) as keeper:
        with anyio.fail_after(WITHIN_S):
            old = await keeper.opened()
            sessions.failures.extend(PeerLost("not yet") for _ in range(3))
            old.note_replaced()
            old.lose(GONE)
            new = await keeper.opened()

            assert sessions.resumed[-1] == (old, new)
            assert keeper.num_opened == 2


async def test_leaving_closes_the_session_and_hands_on_what_was_raised() -> None:
    sessions = Sessions()
    keeper = kept(sessions)

    async def fail_inside() -> None:
        async with keeper:
            with anyio.fail_after(WITHIN_S):
                await keeper.opened()
            raise ValueError("a fault of the engine")

    with pytest.raises(ValueError, match="of the engine"):
        await fail_inside()

    assert sessions.closed == sessions.all
    assert keeper.session is None
    assert isinstance(keeper.problem, ClosedError)
