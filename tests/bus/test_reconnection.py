"""A peer that ends, comes back or was replaced is noticed, and nothing waits for it."""

import asyncio
import select
from typing import Any

import pytest
import zmq

from kvbus.bus import RequestClient
from kvbus.errors import ClosedError, ErrorCode, PeerLost, RequestRefused
from tests.bus.messages import Ask, Echoed, serve, session_of

pytestmark = pytest.mark.anyio


async def test_a_forgotten_boot_is_answered_stale(context, endpoint, running) -> None:
    server = serve(context, endpoint)
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        await client.ask(Ask(), timeout_s=20)
        session = session_of(server, "client")
        server.forget("client")
        with pytest.raises(RequestRefused) as failure:
            await client.ask(Ask(), timeout_s=20)
        with pytest.raises(ClosedError):
            session.notify("late", {})

    assert failure.value.code is ErrorCode.STALE
    assert session_of(server, "client") is None


async def test_what_is_pending_fails_when_the_server_comes_back_as_a_new_one(
    context, endpoint, running, earlier_context, raw_peer
) -> None:
    boots: list[str] = []
    old = raw_peer(zmq.ROUTER, endpoint, earlier_context)
    client = RequestClient(context, endpoint, boot="client", on_boot=boots.append, retry_s=0.05)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(client):
        asked = client.send(Ask(number=1), timeout_s=30, on_reply=outcomes.put_nowait)
        identity, _ = await old.frames()
        old.put({"v": 1, "re": asked, "boot": "old", "ok": {}}, identity)
        first = await outcomes.get()
        client.send(Ask(number=2), timeout_s=30, on_reply=outcomes.put_nowait)
        await old.frames()
        earlier_context.destroy(linger=0)
        server = serve(context, endpoint, boot="new")
        async with running(server):
            lost = await outcomes.get()
            third = await client.ask(Ask(number=3), timeout_s=30)

    assert first == Echoed()
    assert isinstance(lost, PeerLost)
    assert third == Echoed(number=3)
    assert boots == ["old", "new"]
    assert client.peer_boot == "new"


async def test_a_late_message_of_an_earlier_boot_changes_nothing(
    context, endpoint, running, raw_peer
) -> None:
    boots: list[str] = []
    server = raw_peer(zmq.ROUTER, endpoint)
    client = RequestClient(context, endpoint, boot="client", on_boot=boots.append, ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(client):
        asked = client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        identity, _ = await server.frames()
        for boot, reply_id in (("old", 99), ("new", 99), ("old", asked)):
            server.put({"v": 1, "re": reply_id, "boot": boot, "ok": {}}, identity)
        lost = await outcomes.get()
        asked = client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        server.put({"v": 1, "re": asked, "boot": "old", "ok": {"text": "old"}}, identity)
        server.put({"v": 1, "re": asked, "boot": "new", "ok": {"text": "new"}}, identity)
        second = await outcomes.get()

    assert isinstance(lost, PeerLost)
    assert second == Echoed(text="new")
    assert boots == ["old", "new"]
    assert client.counters.stale == 2


async def test_a_silent_server_that_was_replaced_is_noticed_without_a_request(
    context, endpoint, running, earlier_context
) -> None:
    boots: asyncio.Queue[str] = asyncio.Queue()
    client = RequestClient(context, endpoint, boot="client", on_boot=boots.put_nowait, ping_s=0.05)

    async with running(client):
        async with running(serve(earlier_context, endpoint, boot="one")):
            first = await boots.get()
        earlier_context.term()
        async with running(serve(context, endpoint, boot="two")):
            second = await boots.get()

    assert (first, second) == ("one", "two")


async def test_calls_in_progress_are_refused_when_the_server_ends(
    context, endpoint, running, hold
) -> None:
    server = serve(context, endpoint, hold)
    client = RequestClient(context, endpoint, boot="client")
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(client):
        async with running(server):
            client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
            await hold.arrived.get()
        refused = await outcomes.get()

    assert refused.code is ErrorCode.CLOSED


async def test_requests_of_a_closed_client_fail(context, endpoint, running) -> None:
    client = RequestClient(context, endpoint, boot="client")
    outcomes: list[Any] = []

    async with running(client):
        client.send(Ask(), timeout_s=30, on_reply=outcomes.append)

    assert [type(outcome) for outcome in outcomes] == [ClosedError]
    with pytest.raises(ClosedError):
        client.send(Ask(), timeout_s=30, on_reply=outcomes.append)


async def test_a_reply_that_came_just_before_another_send_is_not_overlooked(
    context, endpoint, running, raw_peer
) -> None:
    """Sending swallows the descriptor's signal for what has arrived, and nothing follows it."""
    server = raw_peer(zmq.ROUTER, endpoint)
    client = RequestClient(context, endpoint, boot="client", retry_s=30, ping_s=30)
    descriptor = client._pump._socket.fileno()
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(client):
        for _ in range(50):
            request_id = client.send(Ask(), timeout_s=60, on_reply=outcomes.put_nowait)
            identity, _ = await server.frames()
            server.put({"v": 1, "re": request_id, "boot": "server", "ok": {}}, identity)
            assert select.select([descriptor], [], [], 10)[0]
            client.send(Ask(), timeout_s=60, on_reply=outcomes.put_nowait)
            assert await outcomes.get() == Echoed()
            await server.frames()
