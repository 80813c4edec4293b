"""A session that is kept: begun, resumed after a loss, what came between goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvbus.engine import KeptSession, Offer
from kvbus.errors import ClosedError, ErrorCode, KVBusError, PeerLost, RequestRefused
from tests.agents import until
from tests.engine.recording import RecordingDecode, RecordingPrefill, failed

GONE, NOT_YET = PeerLost("the agent is gone"), PeerLost("nobody listens yet")
WITHIN_S = 30.0


class Resumable(RecordingDecode):
    def __init__(self, sessions: "Sessions") -> None:
        super().__init__()
        self._sessions = sessions

    async def resume(self, before: RecordingDecode) -> None:
        self._sessions.resumed.append((before, self))
        self._sessions.fail_if_wanted()


class Sessions:
    """Opens sessions with nobody, and keeps what was done with them; ``failures`` come first."""

    def __init__(self, *failures: Exception) -> None:
        self.all: list[Resumable] = []
        self.begun: list[RecordingDecode] = []
        self.resumed: list[tuple[RecordingDecode, RecordingDecode]] = []
        self.closed: list[RecordingDecode] = []
        self.failures = list(failures)
        self.keeper = KeptSession[RecordingDecode](self.open, begin=self.begin)

    def fail_if_wanted(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

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
        self.fail_if_wanted()

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
    """What cannot be begun or resumed is tried with the next one."""
    async with keeping(NOT_YET) as (sessions, keeper, first):
        sessions.failures.append(NOT_YET)
        first.lose(GONE)
        assert (keeper.session, keeper.problem, keeper.latest) == (None, GONE, first)
        second = await sessions.opened()
        second.lose(GONE)
        third = await sessions.opened()

        failed, _, not_resumed, *_ = sessions.all
        assert sessions.begun == [failed, first]
        assert sessions.resumed == [(first, not_resumed), (first, second), (second, third)]
        assert sessions.closed == sessions.all[:-1]
        assert keeper.num_opened == 3


def draining() -> RequestRefused:
    return RequestRefused("the agent ends", code=ErrorCode.DRAINING)


@pytest.mark.anyio
@pytest.mark.parametrize("is_lost", [False, True], ids=["draining", "lost"])
async def test_a_fetch_that_its_agent_did_not_begin_goes_on_with_the_next_one(
    is_lost: bool,
) -> None:
    async with keeping() as (sessions, _, old):
        if is_lost:
            old.lose(GONE)
        fetch = old.fetch({}, num_tokens=0, block_ids={})
        if not is_lost:
            old.on_replies[0](draining())
            old.lose(GONE)
        new = await sessions.opened()
        await until(lambda: new.sent)
        new.answer(failed(fetch.fetch_id, blocks_free=True))

        assert [one.fetch_id for one in new.sent] == [fetch.fetch_id]
        assert fetch.notice == failed(fetch.fetch_id, blocks_free=True)


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["cancelled", "no next agent", "closed"])
async def test_a_fetch_that_waits_for_the_next_agent_ends_once_with_free_blocks(how: str) -> None:
    async with keeping() as (sessions, _, old):
        old.agent_wait_s = WITHIN_S if how == "cancelled" else 0.01
        sessions.failures += [NOT_YET] * 1000
        fetch = old.fetch({}, num_tokens=0, block_ids={})
        old.on_replies[0](draining())
        if how == "cancelled":
            await fetch.cancel()
        elif how == "no next agent":
            await fetch.freed
    if how == "closed":
        await fetch.freed

    assert fetch.notice is not None
    assert fetch.notice.blocks_free
    assert fetch.notice.outcome == ("cancelled" if how == "cancelled" else "failed")
    assert fetch.notice.code == ("cancelled" if how == "cancelled" else "draining")


@pytest.mark.anyio
async def test_an_offer_that_its_agent_did_not_make_is_made_by_the_next_one() -> None:
    first, second = RecordingPrefill(reply=None), RecordingPrefill()
    first.is_kept = True
    made: list[Offer] = []

    async def offer() -> None:
        made.append(await first.offer("r", num_tokens=0, block_ids={}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offer)
        await until(lambda: first.on_replies)
        first.on_replies[0](draining())
        await anyio.wait_all_tasks_blocked()
        first.follow_with(second)

    assert made[0].request_id == "r"
    assert [one.request_id for one in (*first.sent, *second.sent)] == ["r", "r"]


@pytest.mark.anyio
async def test_without_a_keeper_a_refusal_is_raised_at_once() -> None:
    session, failures = RecordingPrefill(reply=None), list[KVBusError]()

    async def offer() -> None:
        try:
            await session.offer("r", num_tokens=0, block_ids={})
        except KVBusError as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(offer)
        await until(lambda: session.on_replies)
        session.on_replies[0](draining())

    assert [error.code for error in failures] == [ErrorCode.DRAINING]


@pytest.mark.anyio
async def test_leaving_closes_the_session_and_hands_on_what_was_raised() -> None:
    seen: list[Sessions] = []

    async def fail_inside() -> None:
        async with keeping() as (sessions, _, __):
            seen.append(sessions)
            raise ValueError("a fault of the engine")

    with pytest.raises(ValueError, match="of the engine"):
        await fail_inside()

    assert seen[0].closed == seen[0].all
    assert seen[0].keeper.session is None
    assert isinstance(seen[0].keeper.problem, ClosedError)
