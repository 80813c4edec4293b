"""What a link does while there is no agent, and at its end; what only a scheduler's link can do."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import Completion, Fetch, Link, Offer, RankMemory
from kvbus.errors import ClosedError, FetchFailed, GeometryError, LocalError, PeerLost
from tests.support.agents import wait_until
from tests.support.memories import NHD
from tests.unit.engine.recording import SPEC

WITHIN_S = 30.0
ONE: dict[str, Any] = {"num_tokens": 1, "block_ids": {"full": [1], "window": [1], "state": [0]}}


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


def test_entering_raises_why_there_is_no_agent(nowhere: Path) -> None:
    with pytest.raises(PeerLost), Link(nowhere, SPEC):
        pass


@pytest.mark.anyio
async def test_so_it_does_in_an_event_loop(nowhere: Path) -> None:
    with pytest.raises(PeerLost):
        async with Link(nowhere, SPEC):
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


def test_offers_and_fetches_without_agent_end_at_once_told_once(
    nowhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(nowhere, SPEC).start()
    try:
        assert not link.wait_open(0.5)
        assert isinstance(link.problem, PeerLost)
        offer, fetch = link.offer("r", **ONE), link.fetch({}, **ONE)
        waited = link.offer("waited for", **ONE)
        link.release({})
        with pytest.raises(PeerLost):
            waited.ended.wait(WITHIN_S)
        with pytest.raises(PeerLost):
            offer.made.wait(WITHIN_S)
        while not fetch.freed.done():
            fetch.freed.wait(WITHIN_S)

        assert link.ended() == [offer, fetch]
        assert link.ended() == []
        assert fetch.notice is not None
        assert fetch.notice.stage == "requested"
        with pytest.raises(FetchFailed):
            fetch.ended.wait(WITHIN_S)
    finally:
        link.close()
    assert caplog.text.count("cannot be opened") == 1


def test_a_closed_link_takes_nothing_and_waits_for_nothing(nowhere: Path) -> None:
    link = Link(nowhere, SPEC).start()
    link.close()
    link.close()

    for call in (lambda: link.offer("r", **ONE), lambda: link.fetch({}, **ONE)):
        with pytest.raises(ClosedError):
            call()


def test_wrong_ids_are_refused_in_calling_thread(nowhere: Path) -> None:
    link = Link(nowhere, SPEC)
    for ids in ([-1], [0.5], [[1], [2]]):
        with pytest.raises(GeometryError):
            link.offer("r", num_tokens=1, block_ids={"full": ids})
        with pytest.raises(GeometryError):
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


def test_what_is_awaited_in_another_loop_comes_there(nowhere: Path) -> None:
    link = Link(nowhere, SPEC).start()
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


@pytest.mark.parametrize("poll", POLLS)
def test_a_handle_that_was_polled_and_dropped_is_not_kept(nowhere: Path, poll: str) -> None:
    link = Link(nowhere, SPEC).start()
    link.wait_open(0.2)

    def polled() -> weakref.ref[Offer | Fetch]:
        handle = link.offer("r", **ONE) if poll == "error" else link.fetch({}, **ONE)
        wait_until(lambda: POLLS[poll](handle), poll)
        return weakref.ref(handle)

    kept = polled()
    wait_until(lambda: kept() is None, "no reference is left")
    link.close()


def test_end_is_reported_once_from_first_look_unless_observed(
    nowhere: Path,
) -> None:
    link = Link(nowhere, SPEC).start()
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
