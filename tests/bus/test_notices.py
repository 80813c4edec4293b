"""Notices arrive once and in order, whatever is lost, and no more are kept than allowed."""

import asyncio
from typing import Any

import pytest
import zmq

from kvbus.bus import RequestClient, RequestServer, ServerLimits
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol import Notice
from tests.bus.messages import Ask, serve, session_of

pytestmark = pytest.mark.anyio

NUM_NOTICES = 200


class Numbers:
    """Collects the numbers in notices, and waits for the one that ends them."""

    def __init__(self, last: int) -> None:
        self.numbers: list[int] = []
        self.last, self.complete = last, asyncio.Event()

    def __call__(self, notice: Notice) -> None:
        self.numbers.append(notice.body["number"])
        if notice.body["number"] == self.last:
            self.complete.set()


async def drained(client: RequestClient, server: RequestServer) -> None:
    """Ask until the server has no notice left that was not acknowledged."""
    while session_of(server, client.boot).num_unacknowledged:
        await client.ask(Ask(), timeout_s=30)


async def test_notices_arrive_once_and_in_order_and_are_acknowledged_in_batches(
    context, endpoint, running
) -> None:
    received = Numbers(NUM_NOTICES)
    server = serve(context, endpoint)
    client = RequestClient(context, endpoint, boot="client", on_notice=received)

    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        for number in range(1, NUM_NOTICES + 1):
            session_of(server, "client").notify("fetch.completed", {"number": number})
        await received.complete.wait()
        await drained(client, server)

    assert received.numbers == list(range(1, NUM_NOTICES + 1))
    assert client.counters.requests < NUM_NOTICES


async def test_who_waits_for_a_notice_runs_before_its_acknowledgement_is_made(
    context, endpoint, running
) -> None:
    received: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()
    server = serve(context, endpoint)
    client = RequestClient(
        context, endpoint, boot="client", on_notice=received.set_result, ping_s=60
    )

    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        before = client.counters.requests
        session_of(server, "client").notify("fetch.completed", {"number": 1})
        await received
        at_the_waiter = client.counters.requests
        await drained(client, server)

    assert at_the_waiter == before


@pytest.mark.parametrize("key", ["seq", "ack", "re"])
async def test_notices_arrive_once_though_notices_or_acknowledgements_are_lost(
    context, endpoint, running, lossy_wire, key
) -> None:
    seen: dict[str, int] = {}

    def loses_two_of_three(fields: dict[str, Any]) -> bool:
        if not (key in fields or fields.get("op") == key):
            return False
        seen[key] = seen.get(key, 0) + 1
        return seen[key] % 3 != 0

    received = Numbers(NUM_NOTICES)
    server = serve(context, endpoint + "s", resend_s=0.01)
    client = RequestClient(context, endpoint, boot="client", on_notice=received, retry_s=0.01)
    lossy_wire(endpoint, server.endpoint, loses_two_of_three)

    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        for number in range(1, NUM_NOTICES + 1):
            session_of(server, "client").notify("fetch.completed", {"number": number})
        await received.complete.wait()
        await drained(client, server)

    assert received.numbers == list(range(1, NUM_NOTICES + 1))
    assert seen[key] > 1


async def test_notices_survive_a_new_connection(context, endpoint, running, lossy_wire) -> None:
    """The wire is cut, notices are sent into the void, and another wire is laid."""
    received = Numbers(NUM_NOTICES)
    server = serve(context, endpoint + "s", resend_s=0.05)
    client = RequestClient(context, endpoint, boot="client", on_notice=received, ping_s=0.05)
    wire = lossy_wire(endpoint, server.endpoint, lambda _: False)

    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        session = session_of(server, "client")
        identity = session.identity
        session.notify("fetch.completed", {"number": 1})
        wire.close()
        for number in range(2, NUM_NOTICES + 1):
            session.notify("fetch.completed", {"number": number})
        lossy_wire(endpoint, server.endpoint, lambda _: False)
        await received.complete.wait()

    assert received.numbers == list(range(1, NUM_NOTICES + 1))
    assert session.identity != identity


async def test_a_notice_out_of_order_waits_for_the_ones_before_it(
    context, endpoint, running, raw_peer
) -> None:
    received = Numbers(3)
    server = raw_peer(zmq.ROUTER, endpoint)
    client = RequestClient(context, endpoint, boot="client", on_notice=received, ping_s=30)
    acknowledged = []

    async with running(client):
        asked = client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        identity, _ = await server.frames()
        notice = {"v": 1, "op": "n", "boot": "server"}
        server.put({"v": 1, "re": asked, "boot": "server", "ok": {}}, identity)
        for seq in (1, 3, 2, 2, 3):
            server.put(notice | {"seq": seq, "body": {"number": seq}}, identity)
        await received.complete.wait()
        while not acknowledged or acknowledged[-1]["upto"] < 3:
            ack = await server.get()
            acknowledged.append(ack["body"])
            server.put({"v": 1, "re": ack["id"], "boot": "server", "ok": {}}, identity)

    assert received.numbers == [1, 2, 3]
    assert client.counters.notices_repeated == 2
    assert (acknowledged[-1]["upto"], acknowledged[-1]["boot"]) == (3, "server")


async def test_seqs_of_a_new_boot_start_again(context, endpoint, running, raw_peer) -> None:
    received = Numbers(4)
    server = raw_peer(zmq.ROUTER, endpoint)
    client = RequestClient(context, endpoint, boot="client", on_notice=received, ping_s=30)

    async with running(client):
        client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        identity, _ = await server.frames()
        for number, (boot, seq) in enumerate([("a", 1), ("a", 2), ("b", 1), ("b", 2)], start=1):
            body = {"number": number}
            server.put({"v": 1, "op": "n", "seq": seq, "boot": boot, "body": body}, identity)
        await received.complete.wait()

    assert received.numbers == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "limits",
    [ServerLimits(max_notices=3), ServerLimits(max_notice_bytes=400)],
    ids=["number", "bytes"],
)
async def test_a_notice_too_many_is_busy_and_keeps_the_others(
    context, endpoint, running, raw_peer, limits
) -> None:
    server = serve(context, endpoint, limits=limits, resend_s=30)
    peer = raw_peer(zmq.DEALER, endpoint)
    body = {"x": bytes(75)}

    async with running(server):
        peer.put({"v": 1, "op": "ping", "id": 1, "boot": "raw", "body": {}})
        await peer.get()
        session = session_of(server, "raw")
        for _ in range(3):
            session.notify("n", body)
        with pytest.raises(LocalError) as failure:
            session.notify("n", body)
        ack = {"v": 1, "op": "ack", "id": 2, "boot": "raw", "body": {"upto": 2, "boot": "server"}}
        peer.put(ack)
        arrived = [await peer.get() for _ in range(4)]
        seq = session.notify("n", body)
        unacknowledged = session.num_unacknowledged

    assert failure.value.code is ErrorCode.BUSY
    assert [fields.get("seq") for fields in arrived] == [1, 2, 3, None]
    assert seq == 4
    assert unacknowledged == 2


WRONG = [
    ({"upto": 1, "boot": "earlier"}, "stale"),
    ({"upto": 9, "boot": "server"}, "invalid"),
    ({"upto": -1, "boot": "server"}, "invalid"),
    ({}, "invalid"),
]


async def test_a_wrong_acknowledgement_is_refused_and_acknowledges_nothing(
    context, endpoint, running, raw_peer
) -> None:
    server = serve(context, endpoint, resend_s=30)
    peer = raw_peer(zmq.DEALER, endpoint)

    async with running(server):
        peer.put({"v": 1, "op": "ping", "id": 1, "boot": "raw", "body": {}})
        await peer.get()
        session_of(server, "raw").notify("n", {})
        await peer.get()
        for body, _ in WRONG:
            peer.put({"v": 1, "op": "ack", "id": 2, "boot": "raw", "body": body})
        replies = [await peer.get() for _ in WRONG]
        unacknowledged = session_of(server, "raw").num_unacknowledged

    assert [reply["error"]["code"] for reply in replies] == [code for _, code in WRONG]
    assert unacknowledged == 1


async def test_a_fault_in_the_notice_callback_does_not_hold_the_next_notice(
    context, endpoint, running
) -> None:
    faults: list[Exception] = []
    received = Numbers(2)

    def on_notice(notice: Notice) -> None:
        received(notice)
        if notice.body["number"] == 1:
            raise RuntimeError("oops")

    server = serve(context, endpoint)
    client = RequestClient(
        context, endpoint, boot="client", on_notice=on_notice, on_fault=faults.append
    )

    async with running(server, client):
        await client.ask(Ask(), timeout_s=30)
        session_of(server, "client").notify("n", {"number": 1})
        session_of(server, "client").notify("n", {"number": 2})
        await received.complete.wait()

    assert received.numbers == [1, 2]
    assert [str(fault) for fault in faults] == ["oops"]


async def test_a_session_that_was_notified_is_not_evicted(context, endpoint, running) -> None:
    """Its seqs would start again, and the client would take the new notices for repeats."""
    received = Numbers(1)
    server = serve(context, endpoint, limits=ServerLimits(max_sessions=1))
    first = RequestClient(context, endpoint, boot="first", on_notice=received)
    second = RequestClient(context, endpoint, boot="second")

    async with running(server, first, second):
        await first.ask(Ask(), timeout_s=30)
        session_of(server, "first").notify("n", {"number": 1})
        await received.complete.wait()
        await drained(first, server)
        with pytest.raises(Exception, match="too many sessions"):
            await second.ask(Ask(), timeout_s=30)

    assert session_of(server, "first") is not None
