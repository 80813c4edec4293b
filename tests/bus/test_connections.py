"""A peer that ends, comes back or was replaced is noticed, and nothing waits for it."""

import asyncio
import socket
from typing import Any

import pytest
import zmq

from kvbus.bus import EventListener, new_context
from kvbus.errors import ClosedError, ErrorCode, PeerLost, RequestRefused
from tests.agents import until
from tests.bus.conftest import TCP, Bus, Hold
from tests.bus.messages import Ask, Echoed, session_of
from tests.security.wire import address_of

pytestmark = pytest.mark.anyio

NUM_PINGS = 20


async def test_a_forgotten_boot_is_answered_stale(bus: Bus) -> None:
    async with bus.pair() as (server, client):
        await client.ask(Ask(), timeout_s=20)
        session = session_of(server, "client")
        server.forget("client")
        with pytest.raises(RequestRefused) as failure:
            await client.ask(Ask(), timeout_s=20)
        with pytest.raises(ClosedError):
            session.notify("late", {})

    assert failure.value.code is ErrorCode.STALE
    assert len(server.sessions) == 0


async def test_what_is_pending_fails_when_the_server_comes_back_as_a_new_one(bus: Bus) -> None:
    boots: list[str] = []
    earlier = new_context()  # once it is destroyed the endpoint's file is really gone
    old, client = (
        bus.raw(zmq.ROUTER, context=earlier),
        bus.client(on_boot=boots.append, retry_s=0.05),
    )
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
            third = await client.ask(Ask(number=3), timeout_s=30)

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
    assert client.counters.stale == 2


async def test_a_silent_server_that_was_replaced_is_noticed_without_a_request(bus: Bus) -> None:
    boots: asyncio.Queue[str] = asyncio.Queue()
    earlier, client = new_context(), bus.client(on_boot=boots.put_nowait, ping_s=0.05)

    async with bus.running(client):
        async with bus.running(bus.server(boot="one", context=earlier)):
            first = await boots.get()
        earlier.term()
        async with bus.running(bus.server(boot="two")):
            second = await boots.get()

    assert (first, second) == ("one", "two")


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


async def test_a_client_is_told_once_that_its_server_is_gone_and_goes_on_when_it_is_back(
    bus: Bus,
) -> None:
    gone: list[str] = []
    server = bus.server(at=TCP, boot="first")
    client = bus.client(at=server.endpoint, on_gone=gone.append)

    async with bus.running(client):
        async with bus.running(server):
            await client.ask(Ask(), timeout_s=30)
            told_early = client.is_gone
        await until(lambda: client.is_gone)
        async with bus.running(bus.server(at=server.endpoint, boot="second")):
            await until(lambda: client.peer_boot == "second")
            still_gone = client.is_gone

    assert (told_early, still_gone) == (False, False)
    assert gone == ["first"]


async def test_nobody_is_gone_who_never_answered_or_still_listens(bus: Bus) -> None:
    gone: list[str] = []
    server = bus.server(at=TCP)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    clients = [
        bus.client(at=at, on_gone=gone.append, ping_s=0.1) for at in (nobody, server.endpoint)
    ]
    listeners: list[socket.socket] = []

    def listens() -> bool:
        try:
            listeners.append(socket.create_server(address_of(server.endpoint)))
        except OSError:  # ZeroMQ gives the address back when it comes to it
            return False
        return True

    async with bus.running(*clients):
        async with bus.running(server):
            await clients[1].ask(Ask(), timeout_s=30)
        await until(listens)
        await until(lambda: all(client.counters.timeouts >= 5 for client in clients))
        listeners[0].close()

    assert gone == []


async def test_a_server_that_is_heard_elsewhere_is_not_pinged(bus: Bus) -> None:
    def note(boot: str) -> None:
        heard.note_alive(boot)  # as by a heartbeat right after the first reply

    server, heard = bus.server(boot="one"), bus.client("heard", on_boot=note, ping_s=0.02)
    silent = bus.client("silent", ping_s=0.02)

    async with bus.running(server, heard, silent):
        await until(lambda: heard.peer_boot and silent.counters.requests >= NUM_PINGS)

    assert heard.counters.requests <= 3


async def test_a_heartbeat_of_another_process_is_asked_for_its_name(bus: Bus) -> None:
    async with bus.pair(server={"boot": "one"}, ping_s=30) as (_, client):
        client.note_alive("before the server is known")
        num_before = client.counters.requests
        client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        await until(lambda: client.peer_boot)
        client.note_alive("two")
        client.note_alive("two")

        assert (num_before, client.counters.requests) == (0, 2)


async def test_a_subscriber_tells_of_each_heartbeat(bus: Bus) -> None:
    beats: asyncio.Queue[Any] = asyncio.Queue()

    class Listener(EventListener):
        def on_heartbeat(self, endpoint: str, boot: str, reads: int) -> None:
            beats.put_nowait((endpoint, boot, reads))

    publisher = bus.publisher("one")
    publisher.count_reads = lambda: 7

    async with bus.running(publisher, bus.subscriber(Listener(), topics=("any",))):
        seen = [await beats.get() for _ in range(3)]

    assert seen == [(bus.endpoint, "one", 7)] * 3
