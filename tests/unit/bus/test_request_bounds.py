"""Every bound of requests is an explicit refusal, at no cost for others."""

import asyncio
import socket
import time
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from kvbus.bus import Call, Quota, ServerLimits
from kvbus.errors import ErrorCode, LocalError, ProtocolError, RequestRefused
from kvbus.protocol import MAX_FRAME_BYTES, MAX_ITEMS, MAX_PEER_ITEMS, Ping, num_items
from tests.process.security.wire import connected, frame
from tests.support.agents import until
from tests.unit.bus.conftest import TCP, Bus, Hold
from tests.unit.bus.messages import Ask, AskNow, Echoed, asked, session_of

pytestmark = pytest.mark.anyio
ESTABLISHED, FIN_WAIT_1 = 1, 4
UNKNOWN_TO_PEER = (ESTABLISHED, FIN_WAIT_1)
"""In these states of a TCP connection the other side may not know of its end."""


def state_of(wire: socket.socket) -> int:
    return wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def with_limits(**limits: int) -> dict[str, Any]:
    return {"limits": ServerLimits(**limits)}


@pytest.mark.parametrize("limit", ["max_pending", "max_session_pending"])
async def test_call_over_limit_is_busy_unless_at_once(bus: Bus, hold: Hold, limit: str) -> None:
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    async with bus.pair(hold, server=with_limits(**{limit: 2}), max_pending=3) as (server, client):
        server.on({AskNow: lambda one, call: call.reply(Echoed(number=one.number))})
        for _ in range(3):
            client.send(Ask(), timeout_s=20, on_reply=outcomes.put_nowait)
        with pytest.raises(LocalError) as too_many_here:
            client.send(Ask(), timeout_s=20, on_reply=outcomes.put_nowait)
        refused = await outcomes.get()
        at_once = await client.request(AskNow(number=1), timeout_s=30)
        for call in hold.calls:
            call.reply(Echoed(text="fine"))
        fine = [await outcomes.get(), await outcomes.get()]
    assert too_many_here.value.code is refused.code is ErrorCode.BUSY
    assert at_once == Echoed(number=1)
    assert fine == [Echoed(text="fine")] * 2


@pytest.mark.parametrize("kept", ["waits", "pinned", ""])
async def test_a_session_too_many_is_busy_unless_one_idles(bus: Bus, hold: Hold, kept: str) -> None:
    server, second = bus.server(hold, **with_limits(max_sessions=1)), bus.client("second")
    first = bus.client("first", on_notice=lambda _: None)
    code = ""
    async with bus.running(server, first, second):
        await first.request(Ping(), timeout_s=20)
        session = session_of(server, "first")
        session.pinned = kept == "pinned"
        if kept == "waits":
            first.send(Ask(), timeout_s=20, on_reply=lambda _: None)
            await hold.arrived.get()
        try:
            await second.request(Ping(), timeout_s=20)
        except RequestRefused as refused:
            code = refused.code
    assert code == (ErrorCode.BUSY if kept else "")
    assert [one.boot for one in server.sessions] == ["first" if kept else "second"]


async def test_crowd_of_waiting_senders_keeps_no_other_connection_out(bus: Bus, hold: Hold) -> None:
    server = bus.server(hold, **with_limits(max_sessions=8))
    early, late, crowd = bus.client("early"), bus.client("late"), bus.raw(zmq.DEALER)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    async with bus.running(server, early, late):
        await early.request(Ping(), timeout_s=30)
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
    server, greedy, other = bus.server(), bus.raw(zmq.DEALER), bus.client("other")
    server.on({Ask: Quota(hold, 4)})
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


async def test_frame_at_limit_is_read_over_it_answered_far_over_it_cut(bus: Bus) -> None:
    server = bus.server(lambda _, call: call.reply(Echoed(number=1)))
    client, peer = bus.client(), bus.raw(zmq.DEALER)
    room = MAX_FRAME_BYTES - len(msgpack.packb(asked(1, fill=bytes(70_000)))) + 70_000
    async with bus.running(server, client):
        at_limit = await peer.ask(asked(1, fill=bytes(room)))
        over = await peer.ask(asked(2, fill=bytes(room + 1)))
        peer.socket.send(bytes(2 * MAX_FRAME_BYTES))
        other = await client.request(Ask(number=1), timeout_s=30)
        while not peer.socket.poll(0):
            peer.put(asked(3, op="ping"))
            await anyio.sleep(0.01)
        next_heard = await peer.get()
        with pytest.raises(ProtocolError) as unsent:
            await client.request(Ask(fill=bytes(room + 1)), timeout_s=30)
    assert at_limit["ok"]["number"] == 1
    assert (over["re"], over["error"]["code"]) == (0, "too_large")
    assert other == Echoed(number=1)
    assert next_heard["re"] == 3, "of the new connection"
    assert unsent.value.code is ErrorCode.TOO_LARGE
    assert server.counters.malformed == 1


@pytest.mark.parametrize("at", [TCP, ""], ids=["tcp", "ipc"])
async def test_items_over_bound_are_refused_by_announcing_header(bus: Bus, at: str) -> None:
    """A list in `more`, which the operation does not know, fills the request up to the bound."""
    server = bus.server(at=at)
    peer, most = bus.raw(zmq.DEALER, server.endpoint), MAX_PEER_ITEMS if at else MAX_ITEMS
    full = asked(1, more=[])
    room = most - num_items(msgpack.packb(full))
    async with bus.running(server):
        fine = await peer.ask(asked(1, more=[0] * room))
        over = await peer.ask(asked(2, more=[0] * (room + 1)))
        # The end of the list is missing, which only the count of items does not notice.
        peer.socket.send(msgpack.packb(asked(3, more=[0] * (2 * most)))[: most + 100])
        announced = await peer.get()
    assert "ok" in fine
    assert over["error"]["code"] == announced["error"]["code"] == "too_large"
    assert over["error"]["detail"]["limit"] == most


async def test_large_requests_of_ended_connection_are_dropped(bus: Bus, hold: Hold) -> None:
    """ZeroMQ has queued them all. The small one may be the last `release` of a process."""
    server = bus.server(hold, at=TCP)
    with connected(server.endpoint, "DEALER") as wire:
        for number in range(1, 33):
            wire.sendall(frame(msgpack.packb(asked(number, fill=bytes(16 * 1024)))))
        wire.sendall(frame(msgpack.packb(asked(33))))
        wire.shutdown(socket.SHUT_WR)
        await until(lambda: state_of(wire) not in UNKNOWN_TO_PEER)
        async with bus.running(server):
            await hold.arrived.get()
            num_dropped = server.counters.dropped
    assert [call.request_id for call in hold.calls] == [33]
    assert num_dropped == 32


@pytest.mark.parametrize(
    ("num_requests", "fill", "takes_s", "most_in_a_turn"),
    [(2000, b"", 0.0, 64), (10, bytes(1 << 20), 0.0, 1), (20, b"", 0.004, 1)],
    ids=["many", "large", "slow"],
)
async def test_a_chatty_peer_does_not_hold_the_loop(
    bus: Bus, num_requests: int, fill: bytes, takes_s: float, most_in_a_turn: int
) -> None:
    """Between two batches of a flood the event loop gets its turn."""
    num_asked, turns = 0, list[int]()
    done, peer = anyio.Event(), bus.raw(zmq.DEALER)

    def handle(_: Ask, call: Call) -> None:
        nonlocal num_asked
        num_asked += 1
        time.sleep(takes_s)
        asyncio.get_running_loop().call_soon(lambda: turns.append(num_asked))
        if call.request_id == num_requests:
            done.set()
        call.reply(Echoed())

    server = bus.server(handle)
    for request_id in range(1, num_requests + 1):
        peer.put(asked(request_id, fill=fill))
    async with bus.running(server):
        await done.wait()
    assert turns[0] <= most_in_a_turn
