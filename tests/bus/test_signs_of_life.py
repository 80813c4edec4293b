"""A server whose heartbeats come is not asked for a sign; one with another name is, at once."""

import asyncio
from typing import Any

import pytest

from kvbus.bus import EventListener, EventPublisher, EventSubscriber, RequestClient
from tests.agents import until
from tests.bus.messages import Ask, serve

pytestmark = pytest.mark.anyio

NUM_PINGS = 20


async def test_a_server_that_is_heard_elsewhere_is_not_pinged(context, endpoint, running) -> None:
    def note(boot: str) -> None:
        heard.note_alive(boot)  # as by a heartbeat right after the first reply

    known: asyncio.Queue[str] = asyncio.Queue()
    server = serve(context, endpoint, boot="one")
    heard = RequestClient(context, endpoint, boot="heard", on_boot=note, ping_s=0.02)
    silent = RequestClient(context, endpoint, boot="silent", on_boot=known.put_nowait, ping_s=0.02)

    async with running(server, heard, silent):
        await known.get()
        await until(lambda: heard.peer_boot and silent.counters.requests >= NUM_PINGS)

    assert heard.counters.requests <= 3


async def test_a_heartbeat_of_another_process_is_asked_for_its_name(
    context, endpoint, running
) -> None:
    server = serve(context, endpoint, boot="one")
    client = RequestClient(context, endpoint, boot="client", ping_s=30)

    async with running(server, client):
        client.note_alive("before the server is known")
        num_before = client.counters.requests
        client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        await until(lambda: client.peer_boot)
        client.note_alive("two")
        client.note_alive("two")

        assert (num_before, client.counters.requests) == (0, 2)


async def test_a_subscriber_tells_of_each_heartbeat(context, endpoint, running) -> None:
    beats: asyncio.Queue[Any] = asyncio.Queue()

    class Listener(EventListener):
        def on_heartbeat(self, endpoint: str, boot: str, reads: int) -> None:
            beats.put_nowait((endpoint, boot, reads))

    publisher = EventPublisher(context, endpoint, boot="one", heartbeat_s=0.02)
    publisher.count_reads = lambda: 7
    subscriber = EventSubscriber(context, Listener(), topics=("any",))
    subscriber.add(endpoint)

    async with running(publisher, subscriber):
        seen = [await beats.get() for _ in range(3)]

    assert seen == [(endpoint, "one", 7)] * 3
