"""A peer that ends, comes back or was replaced is noticed, and nothing waits for it."""

import asyncio
import socket
import struct
from typing import Any

import pytest
import zmq

from kvbus.bus import new_context
from kvbus.errors import ClosedError, ErrorCode, PeerLost, RequestRefused, RequestTimeout
from tests.support.agents import until
from tests.unit.bus.conftest import TCP, Bus, Hold
from tests.unit.bus.messages import Ask, Echoed, session_of

pytestmark = pytest.mark.anyio


async def test_a_forgotten_boot_is_answered_stale(bus: Bus) -> None:
    """And its session is not notified."""
    received: list[int] = []
    async with bus.pair(on_notice=lambda one: received.append(one.seq)) as (server, client):
        await client.request(Ask(), timeout_s=20)
        session = session_of(server, "client")
        session.on_unread = lambda: received.append(-1)
        server.sessions.end_boot("client")
        session.notify("n", {})
        with pytest.raises(RequestRefused) as failure:
            await client.request(Ask(), timeout_s=20)
    assert failure.value.code is ErrorCode.STALE
    assert (len(server.sessions), received) == (0, [])


async def test_pending_request_fails_when_server_comes_back_as_new(bus: Bus) -> None:
    boots: list[str] = []
    earlier = new_context()  # once it is destroyed the endpoint's file is really gone
    old, client = bus.raw(zmq.ROUTER, context=earlier), bus.client(on_boot=boots.append)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    async with bus.running(client):
        client.send(Ask(number=1), timeout_s=30, on_reply=outcomes.put_nowait)
        old.answer((await old.asked())["id"], boot="old")
        first = await outcomes.get()
        client.send(Ask(number=2), timeout_s=30, on_reply=outcomes.put_nowait)
        await old.asked()
        earlier.destroy(linger=0)
        async with bus.running(bus.server(boot="new")):
            lost = await outcomes.get()
            third = await client.request(Ask(number=3), timeout_s=30)
    assert first == Echoed()
    assert isinstance(lost, PeerLost)
    assert third == Echoed(number=3)
    assert boots == ["old", "new"]
    assert client.peer_boot == "new"


async def test_a_late_message_of_an_earlier_boot_changes_nothing(bus: Bus) -> None:
    boots: list[str] = []
    server, client = bus.raw(zmq.ROUTER), bus.client(on_boot=boots.append, ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    async with bus.running(client):
        request_id = client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        await server.asked()
        for boot, reply_id in (("old", 99), ("new", 99), ("old", request_id)):
            server.answer(reply_id, boot)
        lost = await outcomes.get()
        request_id = client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        for boot in ("old", "new"):
            server.answer(request_id, boot, text=boot)
        second = await outcomes.get()
    assert isinstance(lost, PeerLost)
    assert second == Echoed(text="new")
    assert boots == ["old", "new"]


async def test_what_is_in_progress_fails_when_either_end_is_closed(bus: Bus, hold: Hold) -> None:
    server, client, outcomes = bus.server(hold), bus.client(), asyncio.Queue[Any]()
    async with bus.running(client):
        async with bus.running(server):
            client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
            await hold.arrived.get()
        refused = await outcomes.get()
        client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
    assert refused.code is ErrorCode.CLOSED
    assert isinstance(outcomes.get_nowait(), ClosedError)
    with pytest.raises(ClosedError):
        client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)


async def test_client_hears_once_of_lost_server_and_goes_on_once_back(bus: Bus) -> None:
    gone: list[str] = []
    server = bus.server(at=TCP, boot="first")
    client = bus.client(at=server.endpoint, on_gone=gone.append)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    lonely = bus.client(at=nobody, on_gone=gone.append)
    async with bus.running(client, lonely):
        async with bus.running(server):
            await client.request(Ask(), timeout_s=30)
        await until(lambda: client.is_gone)
        with pytest.raises(RequestTimeout):
            await lonely.request(Ask(), timeout_s=0.5)
        async with bus.running(bus.server(at=server.endpoint, boot="second")):
            await until(lambda: client.peer_boot == "second")
            still_gone = client.is_gone
    assert not still_gone
    assert gone == ["first"]


async def test_a_server_that_something_hangs_up_for_is_not_gone(bus: Bus) -> None:
    earlier, gone = new_context(), list[str]()
    server = bus.server(at=TCP, context=earlier)
    client = bus.client(at=server.endpoint, on_gone=gone.append)
    num_tries, port = 0, int(server.endpoint.rpartition(":")[2])

    async def close_connections(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_tries
        num_tries += 1
        wire = writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with bus.running(client):
        async with bus.running(server):
            await client.request(Ask(), timeout_s=30)
        earlier.destroy(linger=0)  # the port is free then
        async with await asyncio.start_server(close_connections, "127.0.0.1", port):
            await until(lambda: num_tries >= 6)
        assert not gone
        await until(lambda: client.is_gone)
    assert gone == ["server"]
