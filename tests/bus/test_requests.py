"""Every request gets one reply and is done once, whatever is lost on the way."""

import asyncio
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import Call, RequestClient
from kvbus.errors import ErrorCode, KVBusError, LocalError, RequestRefused, RequestTimeout
from kvbus.protocol import MAX_FRAME_BYTES, Ping
from tests.bus.conftest import Bus, Hold
from tests.bus.messages import Ask, Echoed, asked, echo

pytestmark = pytest.mark.anyio


async def test_each_reply_reaches_the_request_that_asked_for_it(bus: Bus, hold: Hold) -> None:
    """Two hundred requests, answered in the opposite order."""
    replies: dict[int, Any] = {}

    async def ask(client: RequestClient, number: int) -> None:
        replies[number] = await client.ask(Ask(number=number), timeout_s=20)

    async with bus.pair(hold) as (server, client), anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(ask, client, number)
        for _ in range(200):
            await hold.arrived.get()
        for one, call in zip(reversed(hold.asked), reversed(hold.calls), strict=True):
            echo(one, call)

    assert replies == {number: Echoed(number=number) for number in range(200)}
    assert server.num_pending == client.num_pending == 0


@pytest.mark.parametrize("lost", ["re", "id"])
async def test_a_request_whose_reply_or_self_is_lost_is_sent_again_and_done_once(
    bus: Bus, lost: str
) -> None:
    calls: list[Call] = []
    left = 3

    def handle(one: Ask, call: Call) -> None:
        calls.append(call)
        echo(one, call)

    def loses(fields: dict[str, Any]) -> bool:
        nonlocal left
        left -= lost in fields
        return lost in fields and left >= 0

    server = bus.server(handle, bus.endpoint + "s")
    client = bus.client(retry_s=0.02, ping_s=30)
    bus.lossy_wire(server.endpoint, loses)

    async with bus.running(server, client):
        reply = await client.ask(Ask(number=1), timeout_s=30)

    assert reply == Echoed(number=1)
    assert len(calls) == 1
    assert client.counters.retries >= 3


async def test_a_repeat_of_a_request_in_progress_is_absorbed(bus: Bus, hold: Hold) -> None:
    server, peer = bus.server(hold), bus.raw(zmq.DEALER)

    async with bus.running(server):
        for _ in range(3):
            peer.put(asked(5))
        first = await peer.ask(asked(6, op="ping"))
        hold.calls[0].reply(Echoed(number=1))
        second = await peer.get()
        repeated = await peer.ask(asked(5))

    assert (first["re"], second["re"]) == (6, 5)
    assert repeated == second
    assert len(hold.calls) == 1
    assert (server.counters.repeats_absorbed, server.counters.repeats_answered) == (2, 1)


async def test_another_request_under_a_used_id_is_invalid_and_not_done(
    bus: Bus, hold: Hold
) -> None:
    server, peer = bus.server(hold), bus.raw(zmq.DEALER)
    others = [asked(5, op="other", number=1), asked(5, number=2)]

    async with bus.running(server):
        peer.put(asked(5, number=1))
        refused = [await peer.ask(other) for other in others]
        hold.calls[0].reply(Echoed(number=1))
        first = await peer.get()
        refused += [await peer.ask(other) for other in others]
        repeated = await peer.ask(asked(5, number=1))

    assert [(reply["re"], reply["error"]["code"]) for reply in refused] == [(5, "invalid")] * 4
    assert repeated == first
    assert len(hold.calls) == 1


async def test_a_request_without_a_reply_fails_at_its_deadline(bus: Bus, hold: Hold) -> None:
    async with bus.pair(hold) as (_, client):
        await client.ask(Ping(), timeout_s=20)  # connected
        with pytest.raises(RequestTimeout) as failure:
            await client.ask(Ask(), timeout_s=0.05)
        await client.ask(Ping(), timeout_s=20)  # the server has read what was asked before
        hold.calls[0].reply(Echoed())
        await client.ask(Ping(), timeout_s=20)

    assert failure.value.code is ErrorCode.TIMEOUT
    assert client.counters.late_replies == 1


async def test_requests_to_nobody_time_out_and_are_not_sent_later(bus: Bus, hold: Hold) -> None:
    client = bus.client()

    async with bus.running(client):
        with pytest.raises(RequestTimeout):
            await client.ask(Ask(), timeout_s=0.05)
        num_pending = client.num_pending
        async with bus.running(bus.server(hold)):
            await client.ask(Ping(), timeout_s=20)

    assert num_pending == 0
    assert not hold.calls


def refuse(_: Ask, call: Call) -> None:
    call.refuse(KVBusError("lease is over", code=ErrorCode.LEASE_EXPIRED, epoch=7))


def fail(_: object, __: object = None) -> None:
    raise RuntimeError("oops")


def reply_with(fill: Any) -> Any:
    return lambda _, call: call.reply(Echoed(fill=fill))


@pytest.mark.parametrize(
    ("handler", "code", "detail", "num_faults"),
    [
        (refuse, ErrorCode.LEASE_EXPIRED, {"epoch": 7}, 0),
        (fail, ErrorCode.INTERNAL, {}, 1),
        (reply_with(object()), ErrorCode.INTERNAL, {}, 1),
        (reply_with(bytes(MAX_FRAME_BYTES)), ErrorCode.TOO_LARGE, {}, 1),
    ],
    ids=["refused", "a fault", "a reply that cannot be encoded", "a reply that is too large"],
)
async def test_what_a_handler_refuses_or_does_wrong_fails_its_request_alone(
    bus: Bus, handler: Any, code: ErrorCode, detail: dict[str, Any], num_faults: int
) -> None:
    faults: list[str] = []

    def handle(one: Ask, call: Call) -> None:
        (handler if one.text == "bad" else echo)(one, call)

    options = {"on_fault": lambda _, call: faults.append(call.op)}
    async with bus.pair(handle, server=options) as (_, client):
        with pytest.raises(RequestRefused) as failure:
            await client.ask(Ask(text="bad"), timeout_s=20)
        good = await client.ask(Ask(number=1), timeout_s=20)

    assert (failure.value.code, failure.value.detail) == (code, detail)
    assert (failure.value.message == "lease is over") is (handler is refuse)
    assert "oops" not in failure.value.message
    assert faults == ["ask"] * num_faults
    assert good == Echoed(number=1)


async def test_a_fault_that_nobody_takes_ends_the_server(bus: Bus) -> None:
    with pytest.raises(ExceptionGroup) as failure:
        async with bus.pair(fail) as (_, client):
            await client.ask(Ask(), timeout_s=20)

    assert failure.group_contains(RuntimeError, match="oops")


async def test_a_call_is_not_answered_twice(bus: Bus, hold: Hold) -> None:
    async with bus.pair(hold) as (_, client), anyio.create_task_group() as tasks:
        tasks.start_soon(hold.echo_next)
        await client.ask(Ask(), timeout_s=20)

        with pytest.raises(LocalError, match="answered before"):
            hold.calls[0].reply(Echoed())


async def test_a_cancelled_caller_loses_nobody_elses_message(bus: Bus, hold: Hold) -> None:
    async with bus.pair(hold) as (server, client):
        for number in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: client.ask(Ask(), timeout_s=30))
                call = await hold.arrived.get()
                call.reply(Echoed())
                tasks.cancel_scope.cancel()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold.echo_next)
                assert await client.ask(Ask(number=number), timeout_s=30) == Echoed(number=number)

    assert client.num_pending == server.num_pending == 0


async def test_a_fault_in_a_reply_callback_fails_alone(bus: Bus) -> None:
    faults: list[Exception] = []

    async with bus.pair(on_fault=faults.append) as (_, client):
        client.send(Ask(), timeout_s=30, on_reply=fail)
        reply = await client.ask(Ask(number=1), timeout_s=30)

    assert [str(fault) for fault in faults] == ["oops"]
    assert reply == Echoed(number=1)


async def test_a_reply_that_makes_no_sense_fails_its_request_alone(bus: Bus) -> None:
    server, client = bus.raw(zmq.ROUTER), bus.client(ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with bus.running(client):
        for number in ("one", 2):
            client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
            server.answer((await server.asked())["id"], number=number)
        wrong, right = await outcomes.get(), await outcomes.get()

    assert wrong.code is ErrorCode.INVALID
    assert right == Echoed(number=2)


async def test_a_client_counts_what_it_cannot_read_and_goes_on(bus: Bus) -> None:
    server, client = bus.raw(zmq.ROUTER), bus.client(ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    hostile = {"code": 7, "message": [], "detail": {"message": 1, "code": "x", "l": []}}

    async with bus.running(client):
        request_id = client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        identity, request = await server.frames()
        for frames in ([b"\xff\xff"], [b"", b""], [request]):
            server.socket.send_multipart([identity, *frames])
        server.put({"v": 1, "re": 12345, "boot": "server", "ok": {}}, identity)
        server.put({"v": 1, "re": request_id, "boot": "server", "error": hostile}, identity)
        outcome = await outcomes.get()

    assert (client.counters.malformed, client.counters.late_replies) == (3, 1)
    assert outcome.code == "internal"
    assert outcome.detail == {"message": 1, "code": "x", "remote_code": "7"}
