"""Events arrive in order, what was lost is told, and what a publisher does is told."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import EventListener, EventPublisher, SocketOptions, new_context
from kvbus.errors import ConfigError, ErrorCode, LocalError
from kvbus.protocol import Empty, Notice
from tests.agents import until
from tests.bus.conftest import TCP, Bus, RawPeer, Record
from tests.bus.messages import Echoed
from tests.security.wire import MORE, connected, frame

pytestmark = pytest.mark.anyio

RAW = ("boot", "raw")


async def test_events_arrive_in_order_with_a_seq_for_each_op(bus: Bus, record: Record) -> None:
    source = bus.publisher()

    async with bus.running(source, bus.subscriber(record)):
        told = [await record.next()]
        for op in ("offer.created", "offer.created", "offer.released"):
            source.publish(op, Empty())
        told += [await record.next() for _ in range(3)]

    assert told == [
        ("boot", bus.endpoint, "source"),
        ("event", "offer.created", 1),
        ("event", "offer.created", 2),
        ("event", "offer.released", 1),
    ]


def is_encoded(source: EventPublisher, op: str) -> bool:
    """Whether an event is: this one cannot be."""
    try:
        source.publish(op, Echoed(fill=object()))  # type: ignore[arg-type] # as it cannot be encoded
    except Exception:
        return True
    return False


async def test_an_event_that_nobody_wants_any_more_is_counted_and_not_encoded(bus: Bus) -> None:
    """Subscribers come and die: the one that is left still gets what it wants."""
    source, listener, other = bus.publisher(), bus.raw(zmq.SUB), bus.raw(zmq.SUB)

    async with bus.running(source):
        encoded_before = is_encoded(source, "offer.sealed")
        listener.socket.subscribe("offer.")
        other.socket.subscribe("offer.s")
        await until(lambda: is_encoded(source, "offer.released"))
        await until(lambda: is_encoded(source, "offer.sealed"))
        encoded_too = is_encoded(source, "offer")
        listener.socket.close(linger=0)
        await until(lambda: not is_encoded(source, "offer.released"))
        seq = source.publish("offer.sealed", Empty())
        first = await other.get()
        other.socket.close(linger=0)
        await until(lambda: not is_encoded(source, "offer.sealed"))

    assert (encoded_before, encoded_too) == (False, False)
    assert (first["op"], first["seq"]) == ("offer.sealed", seq)
    assert seq > 2


@pytest.mark.parametrize(
    "attack",
    [
        frame(b"\0offer.") * 2,
        frame(b"\1another", MORE) + frame(b"\0offer."),
        b"".join(frame(b"\1%d" % n) for n in range(300)) + frame(b"\0offer."),
    ],
    ids=["unsubscriptions", "one in a second frame", "one behind many topics"],
)
async def test_an_unsubscription_takes_no_events_from_other_connections(
    bus: Bus, attack: bytes
) -> None:
    source = bus.publisher(at=TCP)
    listener = bus.raw(zmq.SUB, source.endpoint)
    listener.socket.subscribe("offer.")

    def has_come(op: str, come: Callable[[], object]) -> bool:
        source.publish(op, Empty())
        return bool(come())

    async with bus.running(source):
        await until(lambda: has_come("offer.created", lambda: listener.socket.poll(0)))
        wire = await anyio.to_thread.run_sync(connected, source.endpoint, "SUB")
        with wire:
            wire.sendall(attack + frame(b"\1read"))
            wire.setblocking(False)
            await until(lambda: has_come("read", lambda: _has_come(wire, b"read")))
        source.publish("offer.sealed", Empty())
        while (await listener.get())["op"] != "offer.sealed":
            pass


def _has_come(wire: socket.socket, text: bytes) -> bool:
    try:
        return text in wire.recv(1 << 16)
    except BlockingIOError:
        return False


def event(op: str, seq: int, boot: str = "raw") -> Any:
    return lambda publisher: publisher.event(op, seq, boot)


def beat(**seqs: int) -> Any:
    return lambda publisher: publisher.heartbeat(
        {name.replace("_", "."): n for name, n in seqs.items()}
    )


def frames(*parts: bytes) -> Any:
    return lambda publisher: publisher.socket.send_multipart(parts)


def wrong_fields(**fields: Any) -> Any:
    given = {"v": 1, "op": "a", "boot": "x", "body": {}} | fields
    return lambda publisher: publisher.put(given, b"b")


SENT_AND_TOLD: dict[str, tuple[list[Any], list[tuple[Any, ...]], dict[str, int]]] = {
    "a missing seq is told before the event that shows it": (
        [event("offer", seq) for seq in (41, 42, 44, 45)],
        [RAW, ("event", 41), ("event", 42), ("gap", "offer"), ("event", 44), ("event", 45)],
        {"gaps": 1},
    ),
    "a lost tail is told by the heartbeat, once": (
        [
            beat(offer=7, fetch=3),
            beat(offer=9, fetch=3),
            beat(offer=9, fetch=3, lease=1),
            event("offer", 10),
        ],
        [RAW, ("gap", "offer"), ("gap", "lease"), ("event", 10)],
        {"gaps": 2},
    ),
    "after a heartbeat the first event of a topic can show a gap": (
        [beat(), event("offer", 1), event("fetch", 2)],
        [RAW, ("event", 1), ("gap", "fetch"), ("event", 2)],
        {},
    ),
    "an event of an earlier boot is not told": (
        [event("offer", seq, boot) for boot, seq in [("1", 1), ("2", 1), ("1", 2), ("2", 2)]],
        [("boot", "1"), ("event", 1), ("boot", "2"), ("event", 1), ("event", 2)],
        {"stale": 1},
    ),
    "what is malformed is counted and changes nothing": (
        [
            frames(b"offer", b"\xff"),
            frames(b"offer"),
            frames(b"offer", b"", b""),
            wrong_fields(op="b", id=1),
            wrong_fields(seq=1),
            lambda publisher: publisher.heartbeat({"offer": "many"}),
            lambda publisher: publisher.heartbeat([]),
            beat(**{f"t{n}": n for n in range(1000)}),
            event("offer", 5),
            event("offer", 5),
            event("offer", 6),
        ],
        [RAW, ("event", 5), ("event", 6)],
        {"malformed": 9},
    ),
}


@pytest.mark.parametrize(("sent", "expected", "counted"), SENT_AND_TOLD.values(), ids=SENT_AND_TOLD)
async def test_what_a_subscriber_tells_of_what_was_sent(
    bus: Bus,
    record: Record,
    sent: list[Any],
    expected: list[tuple[Any, ...]],
    counted: dict[str, int],
) -> None:
    publisher, subscriber = bus.raw(zmq.XPUB), bus.subscriber(record)

    async with bus.running(subscriber):
        await publisher.frames()  # it is subscribed to
        for send in sent:
            send(publisher)
        told = [await record.next() for _ in expected]

    assert [(one[0], one[-1]) for one in told] == expected
    assert {name: getattr(subscriber.counters, name) for name in counted} == counted


async def test_only_chosen_topics_arrive_and_count(bus: Bus, record: Record) -> None:
    publisher: RawPeer = bus.raw(zmq.XPUB)

    async with bus.running(bus.subscriber(record, topics=["offer"])):
        await publisher.frames()
        await publisher.frames()
        for send in (beat(offer=0, fetch=0), event("fetch", 1), beat(offer=0, fetch=1)):
            send(publisher)
        publisher.event("offer", 1)
        told = await record.until("event")

    assert [entry[0] for entry in told] == ["boot", "event"]


async def test_a_heartbeat_carries_the_last_seq_of_each_topic_and_the_uptime(bus: Bus) -> None:
    source, peer = bus.publisher(), bus.raw(zmq.SUB)
    peer.socket.subscribe("heartbeat")

    async with bus.running(source):
        first = await peer.get()
        for op in ("offer.created", "offer.released", "fetch.created"):
            source.publish(op, Empty())
        with pytest.raises(LocalError, match="own"):
            source.publish("heartbeat", Empty())
        second = await peer.get()
        while not second["body"]["seqs"]:
            second = await peer.get()

    assert first["body"]["seqs"] == {}
    assert second["body"]["seqs"] == {"offer.created": 1, "offer.released": 1, "fetch.created": 1}
    assert second["body"]["uptime_s"] > first["body"]["uptime_s"]
    assert second["seq"] > first["seq"]


async def test_a_flood_past_the_hwm_is_told_as_a_gap(bus: Bus, record: Record) -> None:
    source = bus.publisher(options=SocketOptions(hwm=1))
    subscriber = bus.subscriber(record, options=SocketOptions(hwm=1))

    async with bus.running(source, subscriber):
        await record.until("boot")
        for _ in range(5000):
            source.publish("offer.created", Echoed(fill=bytes(4096)))
        told = await record.until("gap")

    assert told[-1] == ("gap", "source", "offer.created")
    assert subscriber.counters.events < 5000


async def test_a_new_boot_is_told_and_numbers_from_the_start(bus: Bus, record: Record) -> None:
    earlier = new_context()  # once it is terminated the endpoint's file is really gone

    async with bus.running(bus.subscriber(record)):
        for boot, home in (("one", earlier), ("two", bus.context)):
            source = bus.publisher(boot, context=home)
            async with bus.running(source):
                assert await record.next() == ("boot", bus.endpoint, boot)
                source.publish("offer.created", Empty())
                assert await record.next() == ("event", "offer.created", 1)
            earlier.term()


async def test_endpoints_come_and_go_while_running(bus: Bus, record: Record) -> None:
    one, two = (bus.publisher(name, bus.endpoint + name) for name in ("one", "two"))
    subscriber = bus.subscriber(record, one.endpoint, max_endpoints=1)

    async with bus.running(one, two, subscriber):
        first = await record.next()
        with pytest.raises(LocalError) as failure:
            subscriber.add(two.endpoint)
        subscriber.remove(one.endpoint)
        subscriber.add(two.endpoint)
        one.publish("offer.created", Empty())
        second = await record.next()
        two.publish("offer.created", Empty())
        third = await record.next()

    assert failure.value.code is ErrorCode.BUSY
    assert (first, second) == (("boot", one.endpoint, "one"), ("boot", two.endpoint, "two"))
    assert third == ("event", "offer.created", 1)


async def test_an_endpoint_that_cannot_be_parsed_is_a_config_error(
    bus: Bus, record: Record
) -> None:
    subscriber = bus.subscriber(record)

    with pytest.raises(ConfigError, match="carrier-pigeon"):
        subscriber.add("carrier-pigeon://somewhere")
    assert subscriber.endpoints == [bus.endpoint]
    subscriber.remove(bus.endpoint)


async def test_a_listener_may_remove_the_endpoint_that_it_is_told_about(bus: Bus) -> None:
    removed = asyncio.Event()

    class Removes(EventListener):
        def on_event(self, endpoint: str, event: Notice) -> None:
            del event
            subscriber.remove(endpoint)
            removed.set()

    publisher, subscriber = bus.raw(zmq.XPUB), bus.subscriber(Removes())

    async with bus.running(subscriber):
        await publisher.frames()
        for seq in range(1, 10):
            publisher.event("offer.created", seq)
        await removed.wait()

    assert subscriber.counters.events == 1


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


async def test_a_publisher_that_never_spoke_or_is_stopped_is_silent_and_then_alive(
    bus: Bus, record: Record, child: int
) -> None:
    never = bus.endpoint + "never"
    subscriber = bus.subscriber(record, bus.endpoint, never, silence_s=1.0)

    async with bus.running(subscriber):
        told = [await record.next(), await record.next()]
        while ("silence", never, None) not in told or ("boot", bus.endpoint, "child") not in told:
            told.append(await record.next())
        os.kill(child, signal.SIGSTOP)
        silence = await record.until("silence")
        os.kill(child, signal.SIGCONT)
        alive = await record.until("alive")

    assert silence[-1] == ("silence", bus.endpoint, "child")
    assert alive[-1] == ("alive", bus.endpoint, "child")
