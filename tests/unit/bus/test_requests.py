"""Requests get one answer, notices come in order, and an error of either side fails alone."""

import asyncio
import math
import socket
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import Call, SocketOptions, new_context
from kvbus.errors import ErrorCode, KVBusError, RequestRefused, RequestTimeout
from kvbus.protocol import MAX_FRAME_BYTES, Ping
from tests.support.agents import until
from tests.unit.bus.conftest import TCP, Bus, Hold, RawPeer
from tests.unit.bus.messages import Ask, Echoed, asked, echo, session_of

pytestmark = pytest.mark.anyio


async def test_unreceived_or_unanswered_requests_fail_at_deadline(bus: Bus, hold: Hold) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        at = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    client = bus.client(at=at)
    async with bus.running(client):
        with pytest.raises(RequestTimeout):
            await client.request(Ask(number=1), timeout_s=0.05)
        async with bus.running(bus.server(hold, at)):
            await client.request(Ping(), timeout_s=20)
            with pytest.raises(RequestTimeout) as failure:
                await client.request(Ask(number=2), timeout_s=0.05)
            await client.request(Ping(), timeout_s=20)  # the server has read what was asked before
            hold.calls[0].reply(Echoed())
            await client.request(Ping(), timeout_s=20)
    assert failure.value.code is ErrorCode.TIMEOUT
    assert [asked.number for asked in hold.asked] == [2]
    assert client.num_pending == 0


async def test_request_is_sent_once_per_connection_and_answered_late(bus: Bus) -> None:
    earlier = new_context()
    first = bus.raw(zmq.ROUTER, TCP, context=earlier)
    at = first.socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    client, outcomes = bus.client(at=at, ping_s=0.05), asyncio.Queue[Any]()
    seen: list[dict[str, Any]] = []

    async def asked_until(num_pings: int, server: RawPeer) -> None:
        while num_pings:
            seen.append(await server.asked())
            if seen[-1]["op"] == "ping":
                server.answer(seen.pop()["id"])
                num_pings -= 1

    async with bus.running(client):
        client.send(Ask(number=1), timeout_s=math.inf, on_reply=outcomes.put_nowait)
        await asked_until(4, first)
        by_first = list(seen)
        earlier.destroy(linger=0)
        second = bus.raw(zmq.ROUTER, at)
        await asked_until(4, second)
        second.answer(seen[0]["id"], number=1)
        reply = await outcomes.get()
    assert len(by_first) == 1
    assert seen == by_first * 2
    assert reply == Echoed(number=1)


async def test_repeat_is_absorbed_in_progress_and_done_again_later(bus: Bus, hold: Hold) -> None:
    server, peer = bus.server(hold), bus.raw(zmq.DEALER)
    async with bus.running(server):
        for _ in range(3):
            peer.put(asked(5, number=1))
        await peer.ask(asked(6, op="ping"))
        in_progress = len(hold.calls)
        hold.calls[0].reply(Echoed(number=1))
        first = await peer.get()
        peer.put(asked(5, number=1))
        await peer.ask(asked(7, op="ping"))
        hold.calls[-1].reply(Echoed(number=1))
        again = await peer.get()
    assert first == again
    assert (in_progress, len(hold.calls)) == (1, 2)
    assert server.counters.repeats_absorbed == 2


async def test_answer_goes_to_current_connection_of_its_sender(bus: Bus, hold: Hold) -> None:
    server, first, second = bus.server(hold), bus.raw(zmq.DEALER), bus.raw(zmq.DEALER)
    async with bus.running(server):
        first.put(asked(5, number=1))
        await hold.arrived.get()
        second.put(asked(5, number=1))
        await second.ask(asked(6, op="ping"))
        first.put(asked(7, number=2))
        first.put(asked(8, "another", op="ping"))
        heard = await first.get()
        hold.calls[0].reply(Echoed(number=1))
        answered = await second.get()
    assert heard["re"] == 8
    assert (answered["re"], answered["ok"]["number"]) == (5, 1)
    assert len(hold.calls) == 1


def refuse(_: Ask, call: Call) -> None:
    call.refuse(KVBusError("lease is over", code=ErrorCode.LEASE_EXPIRED, epoch=7))


def fail(_: object, __: object = None) -> None:
    raise RuntimeError("oops")


def reply_with(fill: Any) -> Any:
    return lambda _, call: call.reply(Echoed(fill=fill))


@pytest.mark.parametrize(
    ("handler", "code", "detail", "num_faults"),
    [
        (refuse, ErrorCode.LEASE_EXPIRED, {"epoch": 7}, 0),
        (fail, ErrorCode.INTERNAL, {}, 1),
        (reply_with(object()), ErrorCode.INTERNAL, {}, 1),
        (reply_with(bytes(MAX_FRAME_BYTES)), ErrorCode.TOO_LARGE, {}, 1),
    ],
    ids=["refused", "a fault", "a reply that cannot be encoded", "a reply that is too large"],
)
async def test_refusal_or_fault_of_handler_fails_its_request_alone(
    bus: Bus, handler: Any, code: ErrorCode, detail: dict[str, Any], num_faults: int
) -> None:
    faults: list[str] = []

    def handle(one: Ask, call: Call) -> None:
        (handler if one.text == "bad" else echo)(one, call)

    options = {"on_fault": lambda _, call: faults.append(call.op)}
    async with bus.pair(handle, server=options) as (_, client):
        with pytest.raises(RequestRefused) as failure:
            await client.request(Ask(text="bad"), timeout_s=20)
        good = await client.request(Ask(number=1), timeout_s=20)
    assert (failure.value.code, failure.value.detail) == (code, detail)
    assert (failure.value.message == "lease is over") is (handler is refuse)
    assert "oops" not in failure.value.message
    assert faults == ["ask"] * num_faults
    assert good == Echoed(number=1)


async def test_callback_fault_fails_alone_but_unhandled_ends_endpoint(bus: Bus) -> None:
    faults: list[Exception] = []
    async with bus.pair(on_notice=fail, on_fault=faults.append) as (server, client):
        client.send(Ask(), timeout_s=30, on_reply=fail)
        await client.request(Ask(), timeout_s=30)
        session_of(server, "client").notify("n", {})
        await until(lambda: len(faults) == 2)
        reply = await client.request(Ask(number=1), timeout_s=30)
    with pytest.raises(ExceptionGroup) as failure:
        async with bus.pair(fail) as (_, client):
            await client.request(Ask(), timeout_s=20)
    assert [str(fault) for fault in faults] == ["oops"] * 2
    assert reply == Echoed(number=1)
    assert failure.group_contains(RuntimeError, match="oops")


async def test_a_cancelled_caller_loses_nobody_elses_message(bus: Bus, hold: Hold) -> None:
    async with bus.pair(hold) as (server, client):
        for number in range(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: client.request(Ask(), timeout_s=30))
                call = await hold.arrived.get()
                call.reply(Echoed())
                tasks.cancel_scope.cancel()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold.echo_next)
                assert await client.request(Ask(number=number), timeout_s=30) == Echoed(
                    number=number
                )
    assert client.num_pending == len(server.pending) == 0


async def test_what_a_server_says_wrong_fails_one_request_at_most(bus: Bus) -> None:
    server, client = bus.raw(zmq.ROUTER), bus.client(ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    hostile = {"code": 7, "message": [], "detail": {"message": 1, "code": "x", "l": []}}

    async def asks() -> int:
        client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        return int((await server.asked())["id"])

    async with bus.running(client):
        request_id = await asks()
        for frames in ([b"\xff\xff"], [b"", b""], [bytes(16)]):
            server.socket.send_multipart([server.identity, *frames])
        server.answer(12345)
        refusal = {"v": 1, "re": request_id, "boot": "server", "error": hostile}
        server.put(refusal, server.identity)
        refused = await outcomes.get()
        server.answer(await asks(), number="one")
        wrong = await outcomes.get()
        server.answer(await asks(), number=2)
        right = await outcomes.get()
    assert refused.code is ErrorCode.INTERNAL
    assert refused.detail == {"message": 1, "code": "x", "remote_code": "7"}
    assert wrong.code is ErrorCode.INVALID
    assert right == Echoed(number=2)


@pytest.mark.parametrize("at", [TCP, "ipc"])
async def test_messages_of_one_loop_turn_arrive_in_order(bus: Bus, hold: Hold, at: str) -> None:
    """A client that is closed in the same turn has sent it all."""
    server = bus.server(hold) if at == "ipc" else bus.server(hold, at)
    client, other = bus.client(at=server.endpoint), bus.client(at=server.endpoint)
    replies: list[Any] = []
    async with bus.running(server), bus.running(other):
        await other.request(Ping(), timeout_s=20)
        async with bus.running(client):
            await client.request(Ping(), timeout_s=20)
            for number in range(5):
                client.send(Ask(number=number), timeout_s=20, on_reply=lambda _: None)
            client.close()
        await until(lambda: len(hold.asked) == 5)
        for number in range(5, 8):
            other.send(Ask(number=number), timeout_s=20, on_reply=replies.append)
        await until(lambda: len(hold.asked) == 8)
        for call, message in zip(hold.calls[5:], hold.asked[5:], strict=True):
            call.reply(Echoed(number=message.number))
        await until(lambda: len(replies) == 3)
    assert [one.number for one in hold.asked] == list(range(8))
    assert [one.number for one in replies] == [5, 6, 7]


async def test_notices_arrive_in_order_between_surrounding_replies(bus: Bus) -> None:
    received: list[int] = []
    async with bus.pair(on_notice=lambda one: received.append(one.seq)) as (server, client):
        await client.request(Ask(), timeout_s=30)
        for _ in range(500):
            session_of(server, "client").notify("n", {})
        await client.request(Ask(), timeout_s=30)
    assert received == list(range(1, 501))


@pytest.mark.parametrize("sent", ["notices", "answers"])
async def test_only_a_peer_that_does_not_read_is_given_up(bus: Bus, hold: Hold, sent: str) -> None:
    server, peer, client = (
        bus.server(hold, options=SocketOptions(hwm=4)),
        bus.raw(zmq.DEALER),
        bus.client(),
    )
    fill, unread = bytes(1 << 20), list[str]()
    async with bus.running(server, client):
        for request_id in range(1, 65):
            peer.put(asked(request_id))
            await hold.arrived.get()
        session_of(server, "raw").on_unread = lambda: unread.append("raw")
        for call in hold.calls:
            if sent == "notices":
                call.session.notify("n", {"fill": fill})
            else:
                call.reply(Echoed(fill=fill))
        client.send(Ask(number=1), timeout_s=30, on_reply=lambda _: None)
        await hold.arrived.get()
        session_of(server, "client").on_unread = lambda: unread.append("client")
        hold.calls[-1].session.notify("n", {})
    assert set(unread) == {"raw"}
