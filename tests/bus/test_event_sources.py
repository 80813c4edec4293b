"""Publishers come, go, stop and start again, and the subscriber tells which did what."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvbus.bus import EventListener, EventPublisher, EventSubscriber
from kvbus.errors import ConfigError, ErrorCode, LocalError
from kvbus.protocol import Empty, Notice

pytestmark = pytest.mark.anyio


PUBLISHER = """
import sys, anyio
from kvbus.bus import EventPublisher, new_context
async def main():
    with new_context() as context:
        await EventPublisher(context, sys.argv[1], boot="child", heartbeat_s=0.05).run()
anyio.run(main)
"""


@pytest.fixture
def child(endpoint: str) -> Iterator[int]:
    """The process id of another process that publishes at ``endpoint``."""
    with subprocess.Popen([sys.executable, "-c", PUBLISHER, endpoint]) as process:
        yield process.pid
        process.kill()


async def test_a_new_boot_is_told_and_numbers_from_the_start(
    context, endpoint, running, record, earlier_context
) -> None:
    subscriber = EventSubscriber(context, record, silence_s=30)
    subscriber.add(endpoint)

    async with running(subscriber):
        for boot, home in (("one", earlier_context), ("two", context)):
            source = EventPublisher(home, endpoint, boot=boot, heartbeat_s=0.02)
            async with running(source):
                assert await record.next() == ("boot", endpoint, boot)
                source.publish("offer.created", Empty())
                assert await record.next() == ("event", "offer.created", 1)
            earlier_context.term()


async def test_an_event_of_an_earlier_boot_is_not_told(
    context, endpoint, running, record, publisher
) -> None:
    subscriber = EventSubscriber(context, record)
    subscriber.add(endpoint)

    async with running(subscriber):
        await publisher.subscribed()
        for boot, seq in (("one", 1), ("two", 1), ("one", 2), ("two", 2)):
            publisher.event("offer.created", seq, boot)
        told = [await record.next() for _ in range(5)]

    assert [entry for entry in told if entry[0] == "boot"] == [
        ("boot", endpoint, "one"),
        ("boot", endpoint, "two"),
    ]
    assert [entry[2] for entry in told if entry[0] == "event"] == [1, 1, 2]
    assert subscriber.counters.stale == 1


async def test_endpoints_come_and_go_while_running(context, endpoint, running, record) -> None:
    one = EventPublisher(context, endpoint + "1", boot="one", heartbeat_s=0.02)
    two = EventPublisher(context, endpoint + "2", boot="two", heartbeat_s=0.02)
    subscriber = EventSubscriber(context, record, silence_s=30, max_endpoints=1)

    async with running(one, two, subscriber):
        subscriber.add(one.endpoint)
        first = await record.next()
        with pytest.raises(LocalError) as failure:
            subscriber.add(two.endpoint)
        subscriber.remove(one.endpoint)
        subscriber.add(two.endpoint)
        one.publish("offer.created", Empty())
        second = await record.next()
        two.publish("offer.created", Empty())
        third = await record.next()

    assert first == ("boot", endpoint + "1", "one")
    assert failure.value.code is ErrorCode.BUSY
    assert second == ("boot", endpoint + "2", "two")
    assert third == ("event", "offer.created", 1)


async def test_an_endpoint_that_cannot_be_parsed_is_a_config_error(context, record) -> None:
    subscriber = EventSubscriber(context, record)
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        subscriber.add("carrier-pigeon://somewhere")

    assert subscriber.endpoints == []


async def test_an_endpoint_that_never_spoke_is_told_as_silent(
    context, endpoint, running, record
) -> None:
    subscriber = EventSubscriber(context, record, silence_s=0.02)
    subscriber.add(endpoint)

    async with running(subscriber):
        told = await record.next()

    assert told == ("silence", endpoint, None)


async def test_a_listener_may_remove_the_endpoint_that_it_is_told_about(
    context, endpoint, running, publisher
) -> None:
    removed = asyncio.Event()

    class Removes(EventListener):
        def on_event(self, endpoint: str, event: Notice) -> None:
            del event
            subscriber.remove(endpoint)
            removed.set()

    subscriber = EventSubscriber(context, Removes())
    subscriber.add(endpoint)

    async with running(subscriber):
        await publisher.subscribed()
        for seq in range(1, 10):
            publisher.event("offer.created", seq)
        await removed.wait()

    assert subscriber.counters.events == 1


async def test_a_stopped_publisher_is_told_as_silent_and_then_as_alive(
    context, endpoint, running, record, child
) -> None:
    subscriber = EventSubscriber(context, record, silence_s=1.0)
    subscriber.add(endpoint)

    async with running(subscriber):
        await record.until("boot")
        os.kill(child, signal.SIGSTOP)
        silence = await record.until("silence")
        os.kill(child, signal.SIGCONT)
        alive = await record.until("alive")

    assert silence[-1] == ("silence", endpoint, "child")
    assert alive == [("alive", endpoint, "child")]
