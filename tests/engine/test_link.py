"""What a link does while there is no agent, and at its end; what only a scheduler's link can do."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.engine import Link, RankMemory
from kvbus.errors import ClosedError, FetchFailed, GeometryError, LocalError, PeerLost
from tests.engine.recording import SPEC
from tests.memories import NHD

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
async def test_in_an_event_loop_it_has_no_thread_and_takes_calls_of_others(nowhere: Path) -> None:
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


def test_without_an_agent_offers_and_fetches_end_at_once_and_are_told_once(
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


def test_ids_that_are_none_are_refused_in_the_thread_that_gives_them(nowhere: Path) -> None:
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

    async def wait() -> None:
        await link.offer("r", **ONE)

    with pytest.raises(PeerLost):
        asyncio.run(wait())
    link.close()
    assert link.ended() != []
