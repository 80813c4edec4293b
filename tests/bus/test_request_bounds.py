"""Every bound of requests is an explicit refusal, and nobody else pays for it."""

import asyncio
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import Call, RequestClient, ServerLimits, Shared
from kvbus.errors import ErrorCode, LocalError, ProtocolError, RequestRefused
from kvbus.protocol import MAX_FRAME_BYTES, Ping, encode_request
from tests.bus.messages import Ask, AskNow, Echoed, echo, serve, session_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("limit", ["max_pending", "max_session_pending"])
async def test_a_call_too_many_is_busy(context, endpoint, running, hold, limit) -> None:
    server = serve(context, endpoint, hold, limits=ServerLimits(**{limit: 2}))
    client = RequestClient(context, endpoint, boot="client")
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(server, client):
        for _ in range(3):
            client.send(Ask(), timeout_s=20, on_reply=outcomes.put_nowait)
        refused = await outcomes.get()
        for call in hold.calls:
            call.reply(Echoed(text="fine"))
        fine = [await outcomes.get(), await outcomes.get()]

    assert refused.code is ErrorCode.BUSY
    assert fine == [Echoed(text="fine")] * 2


async def test_a_session_too_many_is_busy_until_another_one_is_idle(
    context, endpoint, running, hold
) -> None:
    server = serve(context, endpoint, hold, limits=ServerLimits(max_sessions=1))
    first = RequestClient(context, endpoint, boot="first")
    second = RequestClient(context, endpoint, boot="second")
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(server, first, second):
        first.send(Ask(), timeout_s=20, on_reply=outcomes.put_nowait)
        call = await hold.arrived.get()
        with pytest.raises(RequestRefused) as refused:
            await second.ask(Ask(), timeout_s=20)
        call.reply(Echoed())
        await outcomes.get()
        await second.ask(Ping(), timeout_s=20)

    assert refused.value.code is ErrorCode.BUSY
    assert server.counters.sessions_evicted == 1
    assert len(server.sessions) == 1


async def test_a_pinned_session_is_not_evicted(context, endpoint, running) -> None:
    server = serve(context, endpoint, limits=ServerLimits(max_sessions=1))
    first = RequestClient(context, endpoint, boot="first")
    second = RequestClient(context, endpoint, boot="second")

    async with running(server, first, second):
        await first.ask(Ask(), timeout_s=20)
        session_of(server, "first").pinned = True
        with pytest.raises(RequestRefused, match="too many sessions"):
            await second.ask(Ask(), timeout_s=20)

    assert session_of(server, "first") is not None


def asked(request_id: int, boot: str) -> dict[str, Any]:
    return {"v": 1, "op": "ask", "id": request_id, "boot": boot, "secret": boot, "body": {}}


async def test_a_crowd_of_senders_that_wait_keeps_none_of_another_connection_out(
    context, endpoint, running, hold, raw_peer
) -> None:
    """One was there before and is idle, one comes after."""
    server = serve(context, endpoint, hold, limits=ServerLimits(max_sessions=8))
    early = RequestClient(context, endpoint, boot="early")
    late = RequestClient(context, endpoint, boot="late")
    crowd = raw_peer(zmq.DEALER, endpoint)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(server, early, late):
        await early.ask(Ping(), timeout_s=30)
        for number in range(20):
            crowd.put(asked(1, f"crowd-{number}"))
        refused = [await crowd.get() for _ in range(13)]
        late.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        made_room = await crowd.get()
        hold.calls[-1].reply(Echoed(text="late"))
        answered = await outcomes.get()

    assert {reply["error"]["code"] for reply in (*refused, made_room)} == {"busy"}
    assert answered == Echoed(text="late")
    assert session_of(server, "early") is not None


async def test_calls_of_one_kind_are_shared_by_those_who_ask(
    context, endpoint, running, hold, raw_peer
) -> None:
    """Its owner hears of the end of a call that had to make room."""
    server = serve(context, endpoint)
    server.on({Ask: Shared(hold, 4)})
    greedy, other = raw_peer(zmq.DEALER, endpoint), RequestClient(context, endpoint, boot="other")
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    ended: list[int] = []

    async with running(server, other):
        for request_id in range(1, 7):
            greedy.put(asked(request_id, f"greedy-{request_id % 2}"))
        refused = {(await greedy.get())["re"] for _ in range(2)}
        for call in hold.calls:
            call.on_end = lambda call=call: ended.append(call.request_id)
        other.send(Ask(number=1), timeout_s=30, on_reply=outcomes.put_nowait)
        other.send(Ask(number=2), timeout_s=30, on_reply=outcomes.put_nowait)
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


async def test_a_server_that_is_full_of_what_waits_takes_what_is_answered_at_once(
    context, endpoint, running, hold
) -> None:
    server = serve(context, endpoint, hold, limits=ServerLimits(max_pending=2))
    server.on({AskNow: echo})
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        for _ in range(2):
            client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        with pytest.raises(RequestRefused) as refused:
            await client.ask(Ask(), timeout_s=30)
        reply = await client.ask(AskNow(number=1), timeout_s=30)

    assert refused.value.code is ErrorCode.BUSY
    assert reply == Echoed(number=1)


async def test_a_client_with_too_many_pending_is_busy_at_once(context, endpoint, running) -> None:
    client = RequestClient(context, endpoint, boot="client", max_pending=1)

    async with running(client):
        client.send(Ask(), timeout_s=20, on_reply=lambda _: None)
        with pytest.raises(LocalError) as failure:
            client.send(Ask(), timeout_s=20, on_reply=lambda _: None)

    assert failure.value.code is ErrorCode.BUSY


async def test_a_repeat_that_is_older_than_the_kept_replies_is_stale_and_not_done_again(
    context, endpoint, running, hold, raw_peer
) -> None:
    server = serve(
        context,
        endpoint,
        lambda asked, call: (hold(asked, call), echo(asked, call)),
        limits=ServerLimits(max_replies=2),
    )
    peer = raw_peer(zmq.DEALER, endpoint)
    replies = []

    async with running(server):
        for request_id in (1, 2, 3, 1, 2):
            peer.put({"v": 1, "op": "ask", "id": request_id, "boot": "raw", "body": {}})
            replies.append(await peer.get())

    assert replies[3]["error"]["code"] == "stale"
    assert replies[4] == replies[1]
    assert [call.request_id for call in hold.calls] == [1, 2, 3]


async def test_kept_replies_are_bounded_by_bytes(context, endpoint, running) -> None:
    limits = ServerLimits(max_reply_bytes=MAX_FRAME_BYTES)
    server = serve(context, endpoint, limits=limits)
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        for _ in range(3):
            await client.ask(Ask(fill=bytes(MAX_FRAME_BYTES // 2)), timeout_s=30)

    assert server._replies.num_bytes <= MAX_FRAME_BYTES
    assert len(server._replies) == 1


async def test_a_frame_just_at_the_limit_is_a_message_like_others(
    context, endpoint, running
) -> None:
    server = serve(context, endpoint, lambda _, call: call.reply(Echoed(number=1)))
    client = RequestClient(context, endpoint, boot="client", retry_s=20)
    asked = "ask", client._last_id, "client", Ask(fill=bytes(70_000))
    overhead = len(encode_request(*asked, secret=client._secret)) - 70_000
    room = MAX_FRAME_BYTES - overhead

    async with running(server, client):
        reply = await client.ask(Ask(fill=bytes(room)), timeout_s=30)
        with pytest.raises(ProtocolError) as failure:
            await client.ask(Ask(fill=bytes(room + 1)), timeout_s=30)

    assert reply == Echoed(number=1)
    assert failure.value.code is ErrorCode.TOO_LARGE


async def test_a_frame_over_the_limit_is_answered_and_one_far_over_it_ends_its_connection(
    context, endpoint, running, raw_peer
) -> None:
    server = serve(context, endpoint)
    client = RequestClient(context, endpoint, boot="client")
    peer = raw_peer(zmq.DEALER, endpoint)

    async with running(server, client):
        peer.socket.send(bytes(MAX_FRAME_BYTES + 1))
        over = await peer.get()
        peer.socket.send(bytes(2 * MAX_FRAME_BYTES))
        other = await client.ask(Ask(number=1), timeout_s=30)

    assert (over["re"], over["error"]["code"]) == (0, "too_large")
    assert other == Echoed(number=1)
    assert server.counters.malformed == 1


async def test_a_chatty_peer_does_not_hold_the_loop(context, endpoint, running, raw_peer) -> None:
    """Between two batches of a flood the event loop gets its turn."""
    turns: list[int] = []
    done = anyio.Event()
    peer = raw_peer(zmq.DEALER, endpoint)

    def handle(_: Ask, call: Call) -> None:
        asyncio.get_running_loop().call_soon(lambda: turns.append(server.counters.requests))
        if call.request_id == 2000:
            done.set()
        call.reply(Echoed())

    server = serve(context, endpoint, handle)
    for request_id in range(1, 2001):
        peer.put({"v": 1, "op": "ask", "id": request_id, "boot": "raw", "body": {}})
    async with running(server):
        await done.wait()

    assert turns[0] <= 64
