"""Events arrive in order; gaps and restarts of a publisher are reported."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import SocketOptions
from kvbus.errors import ConfigError, ErrorCode, LocalError
from kvbus.protocol import Empty
from tests.process.security.wire import MORE, connected, frame
from tests.support.agents import WITHIN_S, until
from tests.unit.bus.conftest import TCP, Bus, RawPeer, Record
from tests.unit.bus.messages import Echoed

pytestmark = pytest.mark.anyio

RAW = ("boot", "raw")


@pytest.mark.parametrize(
    "attack",
    [frame(b"\0offer.") * 2, frame(b"\1another", MORE) + frame(b"\0offer.")],
    ids=["unsubscriptions", "one in a second frame"],
)
async def test_unsubscription_takes_no_events_from_others(bus: Bus, attack: bytes) -> None:
    source = bus.publisher(at=TCP)
    listener = bus.raw(zmq.SUB, source.endpoint)
    listener.socket.subscribe("offer.")

    def has_come(op: str, come: Callable[[], object]) -> bool:
        source.publish(op, Empty())
        return bool(come())

    async with bus.running(source):
        await until(lambda: has_come("offer.created", lambda: listener.socket.poll(0)))
        with await anyio.to_thread.run_sync(connected, source.endpoint, "SUB") as wire:
            wire.sendall(attack + frame(b"\1read"))
            wire.setblocking(False)
            await until(lambda: has_come("read", lambda: _has_come(wire, b"read")))
        source.publish("offer.sealed", Empty())
        while (await listener.get())["op"] != "offer.sealed":
            pass


async def test_endless_topics_end_all_connections_and_listeners_resume(bus: Bus) -> None:
    source = bus.publisher(at=TCP)
    listener = bus.raw(zmq.SUB, source.endpoint)
    listener.socket.subscribe("offer.")
    topics = b"".join(frame(b"\1%d" % number) for number in range(300))
    async with bus.running(source):
        with await anyio.to_thread.run_sync(connected, source.endpoint, "SUB") as wire:
            wire.sendall(topics)
            await anyio.to_thread.run_sync(wait_until_cut, wire)

        def hears() -> object:
            source.publish("offer.sealed", Empty())
            return listener.socket.poll(0)

        await until(hears)


def wait_until_cut(wire: socket.socket) -> None:
    wire.settimeout(WITHIN_S)
    with suppress(ConnectionError):
        while wire.recv(4096):
            pass


def _has_come(wire: socket.socket, text: bytes) -> bool:
    try:
        return text in wire.recv(1 << 16)
    except BlockingIOError:
        return False


def event(op: str, seq: int, boot: str = "raw") -> Any:
    return lambda publisher: publisher.event(op, seq, boot)


def beat(seqs: Any = None, **more: int) -> Any:
    return lambda publisher: publisher.heartbeat(more if seqs is None else seqs)


def frames(*parts: bytes) -> Any:
    return lambda publisher: publisher.socket.send_multipart(parts)


def wrong_fields(**fields: Any) -> Any:
    given = {"v": 1, "op": "a", "boot": "x", "body": {}} | fields
    return lambda publisher: publisher.put(given, b"b")


# fmt: off
SENT_AND_TOLD: dict[str, tuple[list[Any], list[tuple[Any, ...]]]] = {
    "a missing seq is reported before the event that shows it": (
        [event("offer", seq) for seq in (1, 2, 4, 5)],
        [RAW, ("event", 1), ("event", 2), ("gap", "offer"), ("event", 4), ("event", 5)]),
    "events sent before the first that arrives are reported as missing, once": (
        [event("offer", 41), beat(offer=41, fetch=7), event("offer", 42), event("fetch", 8)],
        [RAW, ("gap", "offer"), ("event", 41), ("gap", "fetch"), ("event", 42), ("event", 8)]),
    "a lost tail is reported by the heartbeat, once": (
        [beat(offer=0, fetch=0), beat(offer=2, fetch=0), beat(offer=2, fetch=0, lease=1),
         event("offer", 3)],
        [RAW, ("gap", "offer"), ("gap", "lease"), ("event", 3)]),
    "after a heartbeat the first event of a topic can show a gap": (
        [beat(), event("offer", 1), event("fetch", 2)],
        [RAW, ("event", 1), ("gap", "fetch"), ("event", 2)]),
    "an event of an earlier boot is not reported": (
        [event("offer", seq, boot) for boot, seq in [("1", 1), ("2", 1), ("1", 2), ("2", 2)]],
        [("boot", "1"), ("event", 1), ("boot", "2"), ("event", 1), ("event", 2)]),
    "a malformed message changes nothing": (
        [frames(b"offer", b"\xff"), frames(b"offer"), frames(b"offer", b"", b""),
         wrong_fields(op="b", id=1), wrong_fields(seq=1), beat({"offer": "many"}), beat([]),
         beat({f"t{n}": n for n in range(1000)}),
         event("offer", 1), event("offer", 1), event("offer", 2)],
        [RAW, ("event", 1), ("event", 2)]),
}
# fmt: on


@pytest.mark.parametrize(("sent", "expected"), SENT_AND_TOLD.values(), ids=SENT_AND_TOLD)
async def test_what_a_subscriber_tells_of_what_was_sent(
    bus: Bus, record: Record, sent: list[Any], expected: list[tuple[Any, ...]]
) -> None:
    publisher, subscriber = bus.raw(zmq.XPUB), bus.subscriber(record)
    async with bus.running(subscriber):
        await publisher.frames()  # it is subscribed to
        for send in sent:
            send(publisher)
        told = [await record.told.get() for _ in expected]
    assert [(one[0], one[-1]) for one in told] == expected


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


async def test_a_heartbeat_carries_the_last_seq_of_each_topic(bus: Bus) -> None:
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


async def test_endpoints_come_and_go_while_running(bus: Bus, record: Record) -> None:
    one, two = (bus.publisher(name, bus.endpoint + name) for name in ("one", "two"))
    subscriber = bus.subscriber(record, one.endpoint, max_endpoints=1)
    async with bus.running(one, two, subscriber):
        first = await record.told.get()
        with pytest.raises(LocalError) as failure:
            subscriber.add(two.endpoint)
        subscriber.remove(one.endpoint)
        with pytest.raises(ConfigError, match="carrier-pigeon"):
            subscriber.add("carrier-pigeon://somewhere")
        subscriber.add(two.endpoint)
        one.publish("offer.created", Empty())
        second = await record.told.get()
        two.publish("offer.created", Empty())
        third = await record.told.get()
    assert failure.value.code is ErrorCode.BUSY
    assert (first, second) == (("boot", one.endpoint, "one"), ("boot", two.endpoint, "two"))
    assert third == ("event", "offer.created", 1)
