"""An acknowledgement says when who waits for a notice was told, notice by notice."""

import asyncio
import time

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvbus.bus import RequestClient
from kvbus.bus.inbox import NoticeInbox
from kvbus.protocol import MAX_TOLD, Notice
from tests.bus.messages import Ask, serve, session_of

pytestmark = pytest.mark.anyio

MANY = 3 * MAX_TOLD
DELIVER, TELL, ACKNOWLEDGE = "deliver", "tell", "acknowledge"


async def test_each_notice_was_told_between_its_sending_and_its_waiter(
    context, endpoint, running
) -> None:
    times: list[list[float]] = []
    arrived: asyncio.Queue[int] = asyncio.Queue()
    server = serve(context, endpoint)
    client = RequestClient(
        context, endpoint, boot="c", on_notice=lambda due: arrived.put_nowait(due.seq)
    )

    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        session = session_of(server, "c")
        for _ in range(5):
            times.append([time.monotonic()])
            seq = session.notify("n", {}, times[-1].append)
            assert await arrived.get() == seq
            times[-1].append(time.monotonic())
            while session.num_unacknowledged:
                await client.ask(Ask(), timeout_s=30)

    for sent_at, at_waiter, told_at in times:
        assert sent_at <= told_at <= at_waiter


async def test_of_many_notices_at_once_the_last_are_told_and_all_acknowledged(
    context, endpoint, running
) -> None:
    told: list[int] = []
    arrived = asyncio.Event()
    server = serve(context, endpoint)

    def note(due: Notice) -> None:
        if due.seq == MANY:
            arrived.set()

    client = RequestClient(context, endpoint, boot="c", on_notice=note)
    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        session = session_of(server, "c")
        for number in range(1, MANY + 1):
            session.notify("n", {}, lambda _, number=number: told.append(number))
        await arrived.wait()
        while session.num_unacknowledged:
            await client.ask(Ask(), timeout_s=30)

    assert told == sorted(set(told))
    assert told[-1] == MANY


@pytest.mark.parametrize("times", [[], [2.5], [1.5, 2.5]])
async def test_a_peer_says_of_the_last_notices_when_it_was_told_or_of_none(
    context, endpoint, running, raw_peer, times
) -> None:
    told: list[float] = []
    server = serve(context, endpoint)
    raw = raw_peer(zmq.DEALER, endpoint)

    async with running(server):
        raw.put({"v": 1, "op": "ask", "id": 1, "boot": "raw", "body": {}})
        await raw.get()
        session = session_of(server, "raw")
        for _ in range(2):
            session.notify("n", {}, told.append)
        body = {"upto": 2, "boot": "server"} | ({"told_s": times} if times else {})
        raw.put({"v": 1, "op": "ack", "id": 2, "boot": "raw", "body": body})
        while session.num_unacknowledged:
            await raw.get()

    assert told == times


@given(st.lists(st.sampled_from([DELIVER, TELL, ACKNOWLEDGE]), max_size=40))
def test_an_inbox_says_of_each_acknowledged_notice_when_it_was_told(steps: list[str]) -> None:
    inbox, last, expected, heard = NoticeInbox(), 0, dict[int, float](), dict[int, float]()
    for now, step in enumerate([*steps, TELL, ACKNOWLEDGE]):
        if step == DELIVER:
            last += 1
            assert [due.seq for due in inbox.accept(Notice("n", last, "boot", {}))] == [last]
        elif step == TELL:
            expected |= dict.fromkeys(set(range(1, last + 1)) - expected.keys(), float(now))
            inbox.note_told(float(now))
        else:
            upto, told_s = inbox.told_upto, inbox.take_told()
            heard |= dict(zip(range(upto - len(told_s) + 1, upto + 1), told_s, strict=True))
            assert inbox.acknowledge_due == (upto < last)

    assert heard == expected
    assert inbox.delivered_upto == inbox.told_upto == last
