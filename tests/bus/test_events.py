"""Events arrive in order, and what was lost is told."""

import socket
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import EventPublisher, EventSubscriber, SocketOptions
from kvbus.bus import publisher as publisher_module
from kvbus.errors import LocalError
from kvbus.protocol import Empty, encode_notice
from tests.bus.messages import Echoed
from tests.security.wire import MORE, connected, frame

pytestmark = pytest.mark.anyio


async def test_events_arrive_in_order_with_a_seq_for_each_op(
    context, endpoint, running, record
) -> None:
    source = EventPublisher(context, endpoint, boot="source", heartbeat_s=0.02)
    subscriber = EventSubscriber(context, record, silence_s=30)
    subscriber.add(endpoint)

    async with running(source, subscriber):
        boot = await record.next()
        for op in ("offer.created", "offer.created", "offer.released"):
            source.publish(op, Empty())
        events = [await record.next() for _ in range(3)]

    assert boot == ("boot", endpoint, "source")
    assert events == [
        ("event", "offer.created", 1),
        ("event", "offer.created", 2),
        ("event", "offer.released", 1),
    ]


async def test_an_event_that_nobody_wants_is_counted_and_not_encoded(
    context, endpoint, running, raw_peer, monkeypatch
) -> None:
    encoded: list[str] = []

    def note(op: str, *rest: Any) -> bytes:
        encoded.append(op)
        return encode_notice(op, *rest)

    monkeypatch.setattr(publisher_module, "encode_notice", note)
    source = EventPublisher(context, endpoint, boot="source", heartbeat_s=0.02)
    listener = raw_peer(zmq.SUB, endpoint)

    async with running(source):
        seqs = [source.publish("offer.sealed", Empty())]
        listener.socket.subscribe("offer.")
        while "offer.sealed" not in encoded:
            seqs += [source.publish("offer.sealed", Empty()), source.publish("offer", Empty())]
            await anyio.sleep(0.01)
        first = await listener.get()
        listener.socket.close(linger=0)
        while "offer.sealed" in encoded:
            encoded.clear()
            source.publish("offer.sealed", Empty())
            await anyio.sleep(0.01)

    assert "offer" not in encoded
    assert seqs[0] == 1
    assert first["op"] == "offer.sealed"
    assert first["seq"] in seqs[1:]


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
    context, running, raw_peer, attack
) -> None:
    source = EventPublisher(context, "tcp://127.0.0.1:*", boot="source", heartbeat_s=0.02)
    listener = raw_peer(zmq.SUB, source.endpoint)
    listener.socket.subscribe("offer.")

    async with running(source):
        while not listener.socket.poll(0):
            source.publish("offer.created", Empty())
            await anyio.sleep(0.01)
        wire = await anyio.to_thread.run_sync(connected, source.endpoint, "SUB")
        with wire:
            wire.sendall(attack + frame(b"\1read"))
            wire.setblocking(False)
            while not _has_come(wire, b"read"):
                source.publish("read", Empty())
                await anyio.sleep(0.01)
        source.publish("offer.sealed", Empty())
        while (await listener.get())["op"] != "offer.sealed":
            pass


def _has_come(wire: socket.socket, text: bytes) -> bool:
    try:
        return text in wire.recv(1 << 16)
    except BlockingIOError:
        return False


async def test_an_event_that_nobody_wants_any_more_is_not_encoded_after_a_subscriber_died(
    context, endpoint, running, raw_peer
) -> None:
    source = EventPublisher(context, endpoint, boot="source", heartbeat_s=0.02)
    listener, other = raw_peer(zmq.SUB, endpoint), raw_peer(zmq.SUB, endpoint)

    async with running(source):
        for one in (listener, other):
            one.socket.subscribe("")
            await one.get()
        listener.socket.close(linger=0)
        await other.get()
        still_wanted = source._socket.is_wanted("offer.sealed")
        other.socket.close(linger=0)
        while source._socket.is_wanted("offer.sealed"):
            source.publish("offer.released", Empty())
            await anyio.sleep(0.01)

    assert still_wanted


async def test_a_missing_seq_is_told_before_the_event_that_shows_it(
    context, endpoint, running, record, publisher
) -> None:
    subscriber = EventSubscriber(context, record)
    subscriber.add(endpoint)

    async with running(subscriber):
        await publisher.subscribed()
        for seq in (41, 42, 44, 45):
            publisher.event("offer.created", seq)
        told = [await record.next() for _ in range(6)]

    assert [entry[0] for entry in told] == ["boot", "event", "event", "gap", "event", "event"]
    assert told[3] == ("gap", "raw", "offer.created")
    assert subscriber.counters.gaps == 1


async def test_a_lost_tail_is_told_by_the_heartbeat_once(
    context, endpoint, running, record, publisher
) -> None:
    subscriber = EventSubscriber(context, record)
    subscriber.add(endpoint)

    async with running(subscriber):
        await publisher.subscribed()
        publisher.heartbeat({"offer.created": 7, "fetch.created": 3})
        publisher.heartbeat({"offer.created": 9, "fetch.created": 3})
        publisher.heartbeat({"offer.created": 9, "fetch.created": 3, "lease.granted": 1})
        publisher.event("offer.created", 10)
        told = await record.until("event")

    assert told[1:] == [
        ("gap", "raw", "offer.created"),
        ("gap", "raw", "lease.granted"),
        ("event", "offer.created", 10),
    ]


async def test_after_a_heartbeat_the_first_event_of_a_topic_can_show_a_gap(
    context, endpoint, running, record, publisher
) -> None:
    subscriber = EventSubscriber(context, record)
    subscriber.add(endpoint)

    async with running(subscriber):
        await publisher.subscribed()
        publisher.heartbeat({})
        publisher.event("offer.created", 1)
        publisher.event("fetch.created", 2)
        told = [await record.next() for _ in range(4)]

    assert told[1:] == [
        ("event", "offer.created", 1),
        ("gap", "raw", "fetch.created"),
        ("event", "fetch.created", 2),
    ]


async def test_a_heartbeat_carries_the_last_seq_of_each_topic_and_the_uptime(
    context, endpoint, running, raw_peer
) -> None:
    source = EventPublisher(context, endpoint, boot="source", heartbeat_s=0.02)
    peer = raw_peer(zmq.SUB, endpoint)
    peer.socket.set(zmq.SUBSCRIBE, b"heartbeat")

    async with running(source):
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


async def test_a_flood_past_the_hwm_is_told_as_a_gap(context, endpoint, running, record) -> None:
    source = EventPublisher(
        context, endpoint, boot="source", heartbeat_s=0.05, options=SocketOptions(hwm=1)
    )
    subscriber = EventSubscriber(context, record, silence_s=30, options=SocketOptions(hwm=1))
    subscriber.add(endpoint)

    async with running(source, subscriber):
        await record.until("boot")
        for _ in range(5000):
            source.publish("offer.created", Echoed(fill=bytes(4096)))
        told = await record.until("gap")

    assert told[-1] == ("gap", "source", "offer.created")
    assert subscriber.counters.events < 5000


async def test_only_chosen_topics_arrive_and_count(
    context, endpoint, running, record, publisher
) -> None:
    subscriber = EventSubscriber(context, record, topics=["offer.created"])
    subscriber.add(endpoint)

    async with running(subscriber):
        await publisher.subscribed()
        await publisher.subscribed()
        publisher.heartbeat({"offer.created": 0, "fetch.created": 0})
        publisher.event("fetch.created", 1)
        publisher.heartbeat({"offer.created": 0, "fetch.created": 1})
        publisher.event("offer.created", 1)
        told = await record.until("event")

    assert [entry[0] for entry in told] == ["boot", "event"]


async def test_malformed_events_are_counted_and_change_nothing(
    context, endpoint, running, record, publisher
) -> None:
    subscriber = EventSubscriber(context, record)
    subscriber.add(endpoint)
    socket = publisher.peer.socket

    async with running(subscriber):
        await publisher.subscribed()
        socket.send_multipart([b"offer", b"\xff"])
        socket.send_multipart([b"offer"])
        socket.send_multipart([b"offer", b"", b""])
        publisher.peer.put({"v": 1, "op": "a", "id": 1, "boot": "x", "body": {}}, b"a")
        publisher.peer.put({"v": 1, "op": "a", "seq": 1, "boot": "x", "body": {}}, b"b")
        publisher.heartbeat({"offer": "many"})
        publisher.heartbeat([])
        publisher.heartbeat({f"t{n}": n for n in range(1000)})
        publisher.event("offer.created", 5)
        publisher.event("offer.created", 5)
        publisher.event("offer.created", 6)
        told = await record.until("event")
        last = await record.next()

    assert [entry[0] for entry in told] == ["boot", "event"]
    assert last == ("event", "offer.created", 6)
    assert subscriber.counters.malformed == 9
