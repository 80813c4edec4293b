"""A link without an agent, its end, and the connection that it opens again after a loss."""

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from kvbus import errors
from kvbus.engine import (
    Completion,
    Connection,
    Fetch,
    Link,
    Offer,
    RankMemory,
    ReconnectingConnection,
)
from kvbus.errors import ClosedError, LocalError, PeerLost
from tests.support.agents import until, wait_until
from tests.support.memories import NHD
from tests.unit.engine.recording import SPEC

WITHIN_S = 30.0
ONE: dict[str, Any] = {"num_tokens": 1, "block_ids": {"full": [1], "window": [1], "state": [0]}}


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


@pytest.fixture
def link_soon(nowhere: Path) -> Iterator[Link]:
    link = Link(nowhere, SPEC)
    yield link
    link.close()


@pytest.fixture
def link(link_soon: Link) -> Link:
    """A started link without an agent."""
    return link_soon.start()


def test_entering_raises_why_there_is_no_agent(nowhere: Path) -> None:
    with pytest.raises(PeerLost), Link(nowhere, SPEC):
        pass


@pytest.mark.anyio
async def test_loop_link_has_no_thread_and_takes_calls_from_others(nowhere: Path) -> None:
    num_threads, link = threading.active_count(), Link(nowhere, SPEC)
    with pytest.raises(PeerLost):
        await link.__aenter__()
    assert threading.active_count() == num_threads
    with pytest.raises(ClosedError):
        await asyncio.to_thread(link.offer, "r", **ONE)


@pytest.mark.anyio
async def test_a_link_that_is_left_by_a_cancellation_is_closed(nowhere: Path) -> None:
    before = asyncio.all_tasks()
    link = Link(nowhere, SPEC).start(asyncio.get_running_loop())
    with anyio.CancelScope() as scope:
        scope.cancel()
        await link.aclose()
    assert asyncio.all_tasks() == before
    with pytest.raises(ClosedError):
        link.offer("r", **ONE)


def test_calls_without_agent_fail_at_once(
    link_soon: Link, caplog: pytest.LogCaptureFixture
) -> None:
    link = link_soon.start()
    assert not link.wait_open(0.5)
    assert isinstance(link.problem, PeerLost)
    offer, fetch = link.offer("r", **ONE), link.fetch({}, **ONE)
    waited = link.offer("waited for", **ONE)
    link.release({})
    for later in (waited.ended, offer.made):
        with pytest.raises(PeerLost):
            later.wait(WITHIN_S)
    while not fetch.freed.done():
        fetch.freed.wait(WITHIN_S)
    assert link.ended() == [offer, fetch]
    assert link.ended() == []
    assert fetch.notice is not None
    assert fetch.notice.stage == "requested"
    with pytest.raises(errors.FetchFailed):
        fetch.ended.wait(WITHIN_S)
    assert sum("cannot be opened" in line.getMessage() for line in caplog.records) == 1


def test_a_closed_link_takes_nothing_and_waits_for_nothing(link: Link) -> None:
    link.close()
    link.close()
    for call in (lambda: link.offer("r", **ONE), lambda: link.fetch({}, **ONE)):
        with pytest.raises(ClosedError):
            call()


def test_wrong_ids_are_refused_in_calling_thread(nowhere: Path) -> None:
    link = Link(nowhere, SPEC)
    for ids in ([-1], [0.5], [[1], [2]]):
        with pytest.raises(errors.GeometryError):
            link.offer("r", num_tokens=1, block_ids={"full": ids})
        with pytest.raises(errors.GeometryError):
            link.fetch({}, num_tokens=1, block_ids={"full": ids})
    link.close()


def test_a_workers_link_neither_offers_nor_fetches(nowhere: Path) -> None:
    memory = RankMemory.allocate(SPEC, 0, NHD, num_blocks=2)
    link = Link(nowhere, SPEC, memory=memory, control=False).start()
    try:
        for handle in (link.offer("r", **ONE), link.fetch({}, **ONE)):
            failure = handle.ended.exception(WITHIN_S)
            assert "worker" in str(failure)
    finally:
        link.close()
    with pytest.raises(LocalError, match="of a scheduler, or of memory"):
        Link(nowhere, SPEC, control=False)


def test_what_is_awaited_in_another_loop_comes_there(link: Link) -> None:
    link.wait_open(0.2)
    offer = link.offer("r", **ONE)

    async def wait() -> None:
        await offer

    with pytest.raises(PeerLost):
        asyncio.run(wait())
    link.close()
    assert link.ended() == [offer]


POLLS: dict[str, Callable[[Any], Any]] = {
    "done": lambda handle: handle.ended.done(),
    "error": lambda offer: offer.outcome or offer.error,
    "notice": lambda fetch: fetch.notice,
    "freed": lambda fetch: fetch.freed.done(),
    "are_blocks_free": lambda fetch: fetch.are_blocks_free,
}


def test_a_handle_that_was_polled_and_dropped_is_not_kept(link: Link) -> None:
    link.wait_open(0.2)

    def polled(poll: str) -> weakref.ref[Offer | Fetch]:
        handle = link.offer("r", **ONE) if poll == "error" else link.fetch({}, **ONE)
        wait_until(lambda: POLLS[poll](handle), poll)
        return weakref.ref(handle)

    for kept in map(polled, POLLS):
        wait_until(lambda: kept() is None, "no reference is left")  # noqa: B023 - within the turn


def test_end_is_reported_once_from_first_look_unless_observed(link: Link) -> None:
    link.wait_open(0.2)
    assert link.ended() == []
    heard: list[str] = []
    dropped = [link.offer(name, **ONE).request_id for name in "ab"]
    observed, late, fetch = link.offer("c", **ONE), link.offer("d", **ONE), link.fetch({}, **ONE)
    observed.ended.add_callback(lambda: heard.append("c"))
    link.close()  # what ends has ended
    late.ended.add_callback(lambda: heard.append("d"))
    reported = link.ended()
    assert [one.request_id for one in reported if isinstance(one, Offer)] == dropped
    assert reported[2:] == [fetch]
    assert fetch.are_blocks_free
    assert link.ended() == []
    assert sorted(heard) == ["c", "d"]


@pytest.mark.anyio
async def test_blocking_call_in_loop_of_link_raises_and_names_await(nowhere: Path) -> None:
    link = Link(nowhere, SPEC).start(asyncio.get_running_loop())
    never: Completion[None] = Completion(link.runner)
    calls: list[Callable[[], object]] = [
        never.wait,
        lambda: never.exception(WITHIN_S),
        lambda: link.wait_open(WITHIN_S),
        link.close,
    ]
    for call in calls:
        with pytest.raises(LocalError, match="await"):
            call()
    with pytest.raises(TimeoutError):
        never.wait(0)
    assert not link.wait_open(0)
    await link.aclose()
    link.close()


def test_release_never_raises(nowhere: Path) -> None:
    link = Link(nowhere, SPEC)
    link.release({})
    link.start()
    link.release({})
    link.close()
    link.release({})


GONE, NOT_YET = PeerLost("the agent is gone"), PeerLost("nobody listens yet")


class Nowhere(Connection):
    """A connection without an agent."""

    is_closed = False

    def __init__(self) -> None:
        super().__init__("/nowhere", SPEC.engine_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.is_closed = True


class Connections:
    """Makes connections without an agent, and notes their uses; ``failures`` come first."""

    def __init__(self, *failures: Exception) -> None:
        self.all: list[Nowhere] = []
        self.registered: list[Connection] = []
        self.opened: list[Connection] = []
        self.failures = list(failures)
        self.changes: list[None] = []
        self.keeper = ReconnectingConnection(
            self.connect,
            self.register,
            name="the session",
            on_open=self.opened.append,
            on_change=lambda: self.changes.append(None),
            logger=logging.getLogger("kvbus.engine"),
        )

    def connect(self) -> Nowhere:
        self.all.append(made := Nowhere())
        return made

    async def register(self, connection: Connection) -> None:
        assert self.keeper.problem is not None, "it is not there before it can be used"
        self.registered.append(connection)
        if self.failures:
            raise self.failures.pop(0)

    async def is_open(self, times: int) -> Nowhere:
        await until(lambda: len(self.opened) == times)
        return self.all[-1]


@asynccontextmanager
async def keeping(*failures: Exception) -> AsyncIterator[Connections]:
    connections = Connections(*failures)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connections.keeper.run)
        yield connections
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_connection_is_registered_and_so_is_each_after_a_loss() -> None:
    async with keeping(NOT_YET) as connections:
        first = await connections.is_open(1)
        connections.failures.append(NOT_YET)
        first._lose(GONE)
        await until(lambda: connections.keeper.problem is not None)
        assert connections.keeper.latest is first
        second = await connections.is_open(2)
        failed, _, not_registered, _ = connections.all
        assert connections.registered == [failed, first, not_registered, second]
        assert connections.opened == [first, second]
        assert [one.is_closed for one in connections.all] == [True, True, True, False]
        assert (connections.keeper.problem, connections.keeper.num_opened) == (None, 2)
        assert len(connections.changes) == 5


@pytest.mark.anyio
async def test_a_fault_of_a_registration_is_told_and_tried_again() -> None:
    async with keeping(ValueError("a fault")) as connections:
        await until(lambda: connections.keeper.has_failed)
        problem = connections.keeper.problem
        await connections.is_open(1)
    assert problem is not None
    assert (problem.code, problem.message) == (errors.ErrorCode.INTERNAL, "a fault")


@pytest.mark.anyio
async def test_leaving_closes_the_connection_and_says_so() -> None:
    async with keeping() as connections:
        connection = await connections.is_open(1)
    assert connection.is_closed
    assert isinstance(connections.keeper.problem, ClosedError)
    assert not Connections().keeper.has_failed
    with pytest.raises(ClosedError, match="not open yet"):
        _ = Connections().keeper.latest
