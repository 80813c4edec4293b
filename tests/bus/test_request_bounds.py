"""Every bound of requests is an explicit refusal, and nobody else pays for it."""

import asyncio
import sys
from collections import Counter
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from kvbus.bus import Call, RequestServer, ServerLimits, Shared
from kvbus.errors import ErrorCode, LocalError, ProtocolError, RequestRefused
from kvbus.protocol import MAX_FRAME_BYTES, Ping
from tests.bus.conftest import Bus, Hold, RawPeer
from tests.bus.messages import Ask, AskNow, Echoed, asked, echo, session_of

pytestmark = pytest.mark.anyio


def with_limits(**limits: int) -> dict[str, Any]:
    return {"limits": ServerLimits(**limits)}


@pytest.mark.parametrize("limit", ["max_pending", "max_session_pending"])
async def test_a_call_too_many_is_busy_and_what_is_answered_at_once_is_not(
    bus: Bus, hold: Hold, limit: str
) -> None:
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with bus.pair(hold, server=with_limits(**{limit: 2})) as (server, client):
        server.on({AskNow: echo})
        for _ in range(3):
            client.send(Ask(), timeout_s=20, on_reply=outcomes.put_nowait)
        refused = await outcomes.get()
        at_once = await client.ask(AskNow(number=1), timeout_s=30)
        for call in hold.calls:
            call.reply(Echoed(text="fine"))
        fine = [await outcomes.get(), await outcomes.get()]

    assert refused.code is ErrorCode.BUSY
    assert at_once == Echoed(number=1)
    assert fine == [Echoed(text="fine")] * 2


@pytest.mark.parametrize("kept", ["waits", "pinned", "notified"])
async def test_a_session_too_many_is_busy_until_another_one_is_idle(
    bus: Bus, hold: Hold, kept: str
) -> None:
    """One that was notified is kept: its seqs would start again, and be taken for repeats."""
    server, outcomes = bus.server(hold, **with_limits(max_sessions=1)), asyncio.Queue[Any]()
    notices: asyncio.Queue[Any] = asyncio.Queue()
    first, second = bus.client("first", on_notice=notices.put_nowait), bus.client("second")

    async with bus.running(server, first, second):
        first.send(Ask(), timeout_s=20, on_reply=outcomes.put_nowait)
        call = await hold.arrived.get()
        if kept == "pinned":
            session_of(server, "first").pinned = True
        elif kept == "notified":
            session_of(server, "first").notify("n", {})
            await notices.get()
        if kept == "waits":
            with pytest.raises(RequestRefused, match="too many sessions") as refused:
                await second.ask(Ask(), timeout_s=20)
        call.reply(Echoed())
        await outcomes.get()
        while session_of(server, "first").num_unacknowledged:
            await first.ask(Ping(), timeout_s=20)
        if kept == "waits":
            await second.ask(Ping(), timeout_s=20)
        else:
            with pytest.raises(RequestRefused, match="too many sessions") as refused:
                await second.ask(Ping(), timeout_s=20)

    assert refused.value.code is ErrorCode.BUSY
    assert server.counters.sessions_evicted == (kept == "waits")
    assert len(server.sessions) == 1


async def test_a_crowd_of_senders_that_wait_keeps_none_of_another_connection_out(
    bus: Bus, hold: Hold
) -> None:
    """One was there before and is idle, one comes after."""
    server = bus.server(hold, **with_limits(max_sessions=8))
    early, late, crowd = bus.client("early"), bus.client("late"), bus.raw(zmq.DEALER)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with bus.running(server, early, late):
        await early.ask(Ping(), timeout_s=30)
        for number in range(20):
            crowd.put(asked(1, f"crowd-{number}"))
        refused = [await crowd.get() for _ in range(13)]
        late.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        made_room = await crowd.get()
        hold.calls[-1].reply(Echoed(text="late"))
        answered = await outcomes.get()

        assert session_of(server, "early")
    assert {reply["error"]["code"] for reply in (*refused, made_room)} == {"busy"}
    assert answered == Echoed(text="late")


async def test_calls_of_one_kind_are_shared_by_those_who_ask(bus: Bus, hold: Hold) -> None:
    """Its owner hears of the end of a call that had to make room."""
    server, greedy, other = bus.server(), bus.raw(zmq.DEALER), bus.client("other")
    server.on({Ask: Shared(hold, 4)})
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    ended: list[int] = []

    async with bus.running(server, other):
        for request_id in range(1, 7):
            greedy.put(asked(request_id, f"greedy-{request_id % 2}"))
        refused = {(await greedy.get())["re"] for _ in range(2)}
        for call in hold.calls:
            call.on_end = lambda call=call: ended.append(call.request_id)
        for number in (1, 2):
            other.send(Ask(number=number), timeout_s=30, on_reply=outcomes.put_nowait)
        made_room = [(await greedy.get())["re"] for _ in range(2)]
        told_of = list(ended)
        other.send(Ask(number=3), timeout_s=30, on_reply=outcomes.put_nowait)
        too_many = await outcomes.get()
        hold.calls[-1].reply(Echoed(number=2))
        answered = await outcomes.get()

    assert refused == {5, 6}
    assert made_room == told_of == [4, 3]
    assert too_many.code is ErrorCode.BUSY
    assert answered == Echoed(number=2)


async def test_a_client_with_too_many_pending_is_busy_at_once(bus: Bus) -> None:
    client = bus.client(max_pending=1)

    async with bus.running(client):
        client.send(Ask(), timeout_s=20, on_reply=lambda _: None)
        with pytest.raises(LocalError) as failure:
            client.send(Ask(), timeout_s=20, on_reply=lambda _: None)

    assert failure.value.code is ErrorCode.BUSY


async def test_a_repeat_that_is_older_than_the_kept_replies_is_stale_and_not_done_again(
    bus: Bus,
) -> None:
    done: list[int] = []

    def handle(one: Ask, call: Call) -> None:
        done.append(call.request_id)
        echo(one, call)

    server, peer = bus.server(handle, **with_limits(max_replies=2)), bus.raw(zmq.DEALER)

    async with bus.running(server):
        replies = [await peer.ask(asked(request_id)) for request_id in (1, 2, 3, 1, 2)]

    assert replies[3]["error"]["code"] == "stale"
    assert replies[4] == replies[1]
    assert done == [1, 2, 3]


async def test_kept_replies_are_bounded_by_bytes_with_what_python_takes_for_each(bus: Bus) -> None:
    server = bus.server(**with_limits(max_reply_bytes=MAX_FRAME_BYTES))
    peer, fill = bus.raw(zmq.DEALER), bytes(MAX_FRAME_BYTES // 2)

    async with bus.running(server):
        for number in range(1, 11):
            await peer.ask(asked(number))
        with_small = server.num_reply_bytes
        for number in (11, 12):
            await peer.ask(asked(number, fill=fill))
        earlier, last = [await peer.ask(asked(number, fill=fill)) for number in (11, 12)]

    assert with_small >= 10 * 300
    assert server.num_reply_bytes <= MAX_FRAME_BYTES
    assert earlier["error"]["code"] == "stale"
    assert last["ok"]


async def test_replies_that_are_old_go_when_others_come(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.bus.replies.KEPT_S", 0.0)
    server, peer = bus.server(), bus.raw(zmq.DEALER)

    async with bus.running(server):
        sizes = []
        for number in range(1, 10):
            await peer.ask(asked(number))
            sizes.append(server.num_reply_bytes)
        first, last = await peer.ask(asked(1)), await peer.ask(asked(9))

    assert set(sizes) == {sizes[0]}
    assert first["error"]["code"] == "stale"
    assert last["ok"]


async def test_replies_of_sessions_that_were_evicted_are_not_kept(bus: Bus) -> None:
    server, peer = bus.server(**with_limits(max_sessions=4)), bus.raw(zmq.DEALER)
    sizes = []

    async with bus.running(server):
        for number in range(100):
            await peer.ask(asked(1, f"boot-{number}"))
            sizes.append(server.num_reply_bytes)

    assert sizes[-1] <= sizes[3] + 100


async def test_a_request_costs_the_same_however_many_senders_there_were(bus: Bus) -> None:
    """The work is counted in calls of functions, as time says little on a busy machine."""
    server = bus.server(**with_limits(max_replies=4000))
    flood, peer = bus.raw(zmq.DEALER), bus.raw(zmq.DEALER)

    async with bus.running(server):
        few = await work_of(peer, [f"early-{number}" for number in range(50)])
        for number in range(2000):
            flood.put(asked(number + 1, "one"))
            flood.put(asked(1, f"boot-{number}"))
            await flood.get()
            await flood.get()
        many = await work_of(peer, [f"late-{number}" for number in range(50)])

    assert many < 3 * few


async def work_of(peer: RawPeer, names: list[str]) -> int:
    """How many functions are called for a request of each."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda _, event, __: calls.update([event]))
    for number, name in enumerate(names):
        await peer.ask(asked(number + 1, name))
    sys.setprofile(None)
    return calls["call"]


async def test_a_client_sends_a_frame_just_at_the_limit_and_none_over_it(bus: Bus) -> None:
    server, client = bus.raw(zmq.ROUTER), bus.client(retry_s=20, ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with bus.running(client):
        client.send(Ask(fill=bytes(70_000)), timeout_s=30, on_reply=outcomes.put_nowait)
        _, frame = await server.frames()
        room = MAX_FRAME_BYTES - (len(frame) - 70_000)
        client.send(Ask(fill=bytes(room)), timeout_s=30, on_reply=outcomes.put_nowait)
        _, largest = await server.frames()
        with pytest.raises(ProtocolError) as failure:
            await client.ask(Ask(fill=bytes(room + 1)), timeout_s=30)

    assert len(largest) == MAX_FRAME_BYTES
    assert failure.value.code is ErrorCode.TOO_LARGE


async def test_a_server_reads_a_frame_at_the_limit_answers_one_over_it_and_cuts_one_far_over_it(
    bus: Bus,
) -> None:
    server: RequestServer = bus.server(lambda _, call: call.reply(Echoed(number=1)))
    client, peer = bus.client(), bus.raw(zmq.DEALER)
    overhead = len(msgpack.packb(asked(1, fill=bytes(70_000)))) - 70_000

    async with bus.running(server, client):
        at_limit = await peer.ask(asked(1, fill=bytes(MAX_FRAME_BYTES - overhead)))
        over = await peer.ask(asked(2, fill=bytes(MAX_FRAME_BYTES - overhead + 1)))
        peer.socket.send(bytes(2 * MAX_FRAME_BYTES))
        other = await client.ask(Ask(number=1), timeout_s=30)

    assert at_limit["ok"]["number"] == 1
    assert (over["re"], over["error"]["code"]) == (0, "too_large")
    assert other == Echoed(number=1)
    assert server.counters.malformed == 1


async def test_a_chatty_peer_does_not_hold_the_loop(bus: Bus) -> None:
    """Between two batches of a flood the event loop gets its turn."""
    turns: list[int] = []
    done, peer = anyio.Event(), bus.raw(zmq.DEALER)

    def handle(_: Ask, call: Call) -> None:
        asyncio.get_running_loop().call_soon(lambda: turns.append(server.counters.requests))
        if call.request_id == 2000:
            done.set()
        call.reply(Echoed())

    server = bus.server(handle)
    for request_id in range(1, 2001):
        peer.put(asked(request_id))
    async with bus.running(server):
        await done.wait()

    assert turns[0] <= 64
