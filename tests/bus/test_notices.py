"""Notices arrive once and in order, whatever is lost, and no more are kept than allowed.

An acknowledgement says when who waits for a notice was told, notice by notice.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import zmq

from kvbus.bus import RequestClient, RequestServer, ServerLimits, Session
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol import MAX_TOLD, Notice, Ping
from tests.bus.conftest import Bus, RawPeer
from tests.bus.messages import Ask, asked, session_of

pytestmark = pytest.mark.anyio

NUM_NOTICES = 200


class Numbers:
    """Collects the numbers in notices, and waits for the one that ends them."""

    def __init__(self, last: int = NUM_NOTICES) -> None:
        self.numbers: list[int] = []
        self.last, self.complete = last, asyncio.Event()

    def __call__(self, notice: Notice) -> None:
        self.numbers.append(notice.body["number"])
        if notice.body["number"] == self.last:
            self.complete.set()

    async def all(self) -> bool:
        """Whether each one came once and in order, as soon as the last has come."""
        await self.complete.wait()
        return self.numbers == list(range(1, self.last + 1))


def notify_all(session: Session, first: int = 1, last: int = NUM_NOTICES) -> None:
    for number in range(first, last + 1):
        session.notify("n", {"number": number})


async def drained(client: RequestClient, server: RequestServer) -> None:
    """Ask until the server has no notice left that was not acknowledged."""
    while server.num_unacknowledged:
        await client.ask(Ask(), timeout_s=30)


@asynccontextmanager
async def raw_session(bus: Bus, **options: Any) -> AsyncIterator[tuple[RawPeer, Session]]:
    """A plain peer of a running server, and its session there."""
    server, peer = bus.server(**{"resend_s": 30, **options}), bus.raw(zmq.DEALER)
    async with bus.running(server):
        await peer.ask(asked(1, op="ping"))
        yield peer, session_of(server, "raw")


def ack(**body: Any) -> dict[str, Any]:
    return asked(2, op="ack") | {"body": body}


async def test_notices_arrive_once_and_in_order_and_are_acknowledged_in_batches(bus: Bus) -> None:
    received = Numbers()

    async with bus.pair(on_notice=received) as (server, client):
        await client.ask(Ask(), timeout_s=30)
        notify_all(session_of(server, "client"))

        assert await received.all()
        await drained(client, server)
    assert client.counters.requests < NUM_NOTICES


async def test_who_waits_for_a_notice_runs_before_its_acknowledgement_is_made(bus: Bus) -> None:
    received: asyncio.Queue[Notice] = asyncio.Queue()

    async with bus.pair(on_notice=received.put_nowait, ping_s=60) as (server, client):
        await client.ask(Ask(), timeout_s=30)
        before = client.counters.requests
        session_of(server, "client").notify("n", {})
        await received.get()
        at_the_waiter = client.counters.requests
        await drained(client, server)

    assert at_the_waiter == before


@pytest.mark.parametrize("key", ["seq", "ack", "re"])
async def test_notices_arrive_once_though_notices_or_acknowledgements_are_lost(
    bus: Bus, key: str
) -> None:
    seen, received = 0, Numbers()

    def loses_two_of_three(fields: dict[str, Any]) -> bool:
        nonlocal seen
        is_meant = key in fields or fields.get("op") == key
        seen += is_meant
        return is_meant and seen % 3 != 0

    server = bus.server(at=bus.endpoint + "s", resend_s=0.01)
    client = bus.client(on_notice=received, retry_s=0.01)
    bus.lossy_wire(server.endpoint, loses_two_of_three)

    async with bus.running(server, client):
        await client.ask(Ask(), timeout_s=30)
        notify_all(session_of(server, "client"))

        assert await received.all()
        await drained(client, server)
    assert seen > 1


async def test_notices_survive_a_new_connection(bus: Bus) -> None:
    """The wire is cut, notices are sent into the void, and another wire is laid."""
    received = Numbers()
    server = bus.server(at=bus.endpoint + "s", resend_s=0.05)
    client = bus.client(on_notice=received, ping_s=0.05)
    wire = bus.lossy_wire(server.endpoint, lambda _: False)

    async with bus.running(server, client):
        await client.ask(Ask(), timeout_s=30)
        session = session_of(server, "client")
        identity = session.identity
        notify_all(session, last=1)
        wire.close()
        notify_all(session, first=2)
        bus.lossy_wire(server.endpoint, lambda _: False)

        assert await received.all()
    assert session.identity != identity


async def test_a_notice_out_of_order_waits_and_seqs_of_a_new_boot_start_again(bus: Bus) -> None:
    received = Numbers(last=5)
    server, client = bus.raw(zmq.ROUTER), bus.client(on_notice=received, ping_s=30)
    acknowledged: list[dict[str, Any]] = []

    async with bus.running(client):
        client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        server.answer((await server.asked())["id"])
        for seq in (1, 3, 2, 2, 3):
            server.notify(seq, number=seq)
        while not acknowledged or acknowledged[-1]["upto"] < 3:
            one = await server.asked()
            acknowledged.append(one["body"])
            server.answer(one["id"])
        for seq in (1, 2):
            server.notify(seq, "another", number=3 + seq)

        assert await received.all()
    assert client.counters.notices_repeated == 2
    assert (acknowledged[-1]["upto"], acknowledged[-1]["boot"]) == (3, "server")


@pytest.mark.parametrize(
    "limits",
    [ServerLimits(max_notices=3), ServerLimits(max_notice_bytes=400)],
    ids=["number", "bytes"],
)
async def test_a_notice_too_many_is_busy_and_keeps_the_others(
    bus: Bus, limits: ServerLimits
) -> None:
    body = {"x": bytes(75)}

    async with raw_session(bus, limits=limits) as (peer, session):
        for _ in range(3):
            session.notify("n", body)
        with pytest.raises(LocalError) as failure:
            session.notify("n", body)
        peer.put(ack(upto=2, boot="server"))
        arrived = [await peer.get() for _ in range(4)]
        seq = session.notify("n", body)
        unacknowledged = session.num_unacknowledged

    assert failure.value.code is ErrorCode.BUSY
    assert [fields.get("seq") for fields in arrived] == [1, 2, 3, None]
    assert (seq, unacknowledged) == (4, 2)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"upto": 1, "boot": "earlier"}, "stale"),
        ({"upto": 9, "boot": "server"}, "invalid"),
        ({"upto": -1, "boot": "server"}, "invalid"),
        ({}, "invalid"),
    ],
)
async def test_a_wrong_acknowledgement_is_refused_and_acknowledges_nothing(
    bus: Bus, body: dict[str, Any], code: str
) -> None:
    async with raw_session(bus) as (peer, session):
        session.notify("n", {})
        await peer.get()
        reply = await peer.ask(ack(**body))
        unacknowledged = session.num_unacknowledged

    assert reply["error"]["code"] == code
    assert unacknowledged == 1


async def test_a_fault_in_the_notice_callback_does_not_hold_the_next_notice(bus: Bus) -> None:
    faults: list[Exception] = []
    received = Numbers(2)

    def on_notice(notice: Notice) -> None:
        received(notice)
        if notice.body["number"] == 1:
            raise RuntimeError("oops")

    async with bus.pair(on_notice=on_notice, on_fault=faults.append) as (server, client):
        await client.ask(Ask(), timeout_s=30)
        notify_all(session_of(server, "client"), last=2)

        assert await received.all()
    assert [str(fault) for fault in faults] == ["oops"]


async def test_each_notice_was_told_between_its_sending_and_its_waiter(bus: Bus) -> None:
    times: list[list[float]] = []
    arrived: asyncio.Queue[Notice] = asyncio.Queue()

    async with bus.pair(on_notice=arrived.put_nowait) as (server, client):
        await client.ask(Ping(), timeout_s=30)
        for _ in range(5):
            times.append([time.monotonic()])
            session_of(server, "client").notify("n", {}, times[-1].append)
            await arrived.get()
            times[-1].append(time.monotonic())
            await drained(client, server)

    for sent_at, at_waiter, told_at in times:
        assert sent_at <= told_at <= at_waiter


async def test_of_many_notices_at_once_the_last_are_told_and_all_acknowledged(bus: Bus) -> None:
    told: list[int] = []
    received = Numbers(3 * MAX_TOLD)

    async with bus.pair(on_notice=received) as (server, client):
        await client.ask(Ask(), timeout_s=30)
        for number in range(1, received.last + 1):
            note_told = partial(lambda number, _: told.append(number), number)
            session_of(server, "client").notify("n", {"number": number}, note_told)
        await received.complete.wait()
        await drained(client, server)

    assert told == sorted(set(told))
    assert told[-1] == received.last


@pytest.mark.parametrize("times", [[], [2.5], [1.5, 2.5]])
async def test_a_peer_says_of_the_last_notices_when_it_was_told_or_of_none(
    bus: Bus, times: list[float]
) -> None:
    told: list[float] = []

    async with raw_session(bus) as (peer, session):
        for _ in range(2):
            session.notify("n", {}, told.append)
        peer.put(ack(upto=2, boot="server", **({"told_s": times} if times else {})))
        while session.num_unacknowledged:
            await peer.get()

    assert told == times
