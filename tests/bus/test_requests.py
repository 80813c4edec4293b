"""Every request gets one reply and is done once, whatever is lost on the way."""

import asyncio
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import Call, RequestClient
from kvbus.errors import ErrorCode, KVBusError, LocalError, RequestRefused, RequestTimeout
from kvbus.protocol import MAX_FRAME_BYTES, Ping
from tests.bus.conftest import RawPeer
from tests.bus.messages import Ask, Echoed, echo, serve

pytestmark = pytest.mark.anyio


class Lose:
    """Loses the first messages that have a key, or a key with a value."""

    def __init__(self, number: int, **match: Any) -> None:
        self.left, self.match = number, match

    def __call__(self, fields: dict[str, Any]) -> bool:
        hit = all(
            key in fields and value in (..., fields[key]) for key, value in self.match.items()
        )
        self.left -= hit
        return hit and self.left >= 0


async def test_each_reply_reaches_the_request_that_asked_for_it(
    context, endpoint, running, hold
) -> None:
    """Two hundred requests, answered in the opposite order."""
    server = serve(context, endpoint, hold)
    client = RequestClient(context, endpoint, boot="client")
    replies: dict[int, Any] = {}

    async def ask(number: int) -> None:
        replies[number] = await client.ask(Ask(number=number), timeout_s=20)

    async with running(server, client), anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(ask, number)
        for _ in range(200):
            await hold.arrived.get()
        for asked, call in zip(reversed(hold.asked), reversed(hold.calls), strict=True):
            echo(asked, call)

    assert replies == {number: Echoed(number=number) for number in range(200)}
    assert server.num_pending == client.num_pending == 0


@pytest.mark.parametrize("lost", ["re", "id"])
async def test_a_request_whose_reply_or_self_is_lost_is_sent_again_and_done_once(
    context, endpoint, running, lossy_wire, lost
) -> None:
    calls: list[Call] = []

    def handle(asked: Ask, call: Call) -> None:
        calls.append(call)
        echo(asked, call)

    server = serve(context, endpoint + "s", handle)
    client = RequestClient(context, endpoint, boot="client", retry_s=0.02, ping_s=30)
    lossy_wire(endpoint, server.endpoint, Lose(3, **{lost: ...}))

    async with running(server, client):
        reply = await client.ask(Ask(number=1), timeout_s=30)

    assert reply == Echoed(number=1)
    assert len(calls) == 1
    assert client.counters.retries >= 3


async def test_a_repeat_of_a_request_in_progress_is_absorbed(
    context, endpoint, running, hold, raw_peer
) -> None:
    server = serve(context, endpoint, hold)
    peer = raw_peer(zmq.DEALER, endpoint)
    ask = {"v": 1, "op": "ask", "id": 5, "boot": "raw", "body": {}}

    async with running(server):
        for _ in range(3):
            peer.put(ask)
        peer.put(ask | {"op": "ping", "id": 6})
        first = await peer.get()
        hold.calls[0].reply(Echoed(number=1))
        second = await peer.get()
        peer.put(ask)
        repeated = await peer.get()

    assert (first["re"], second["re"]) == (6, 5)
    assert repeated == second
    assert len(hold.calls) == 1
    assert server.counters.repeats_absorbed == 2
    assert server.counters.repeats_answered == 1


async def test_another_request_under_a_used_id_is_invalid_and_not_done(
    context, endpoint, running, hold, raw_peer
) -> None:
    server = serve(context, endpoint, hold)
    peer = raw_peer(zmq.DEALER, endpoint)
    ask = {"v": 1, "op": "ask", "id": 5, "boot": "raw", "body": {"number": 1}}
    others = [ask | {"op": "other"}, ask | {"body": {"number": 2}}]

    async with running(server):
        peer.put(ask)
        refused = [await answer(peer, other) for other in others]
        hold.calls[0].reply(Echoed(number=1))
        first = await peer.get()
        refused += [await answer(peer, other) for other in others]
        repeated = await answer(peer, ask)

    assert [(reply["re"], reply["error"]["code"]) for reply in refused] == [(5, "invalid")] * 4
    assert repeated == first
    assert len(hold.calls) == 1


async def answer(peer: RawPeer, request: dict[str, Any]) -> Any:
    """What comes back next."""
    peer.put(request)
    return await peer.get()


async def test_a_request_without_a_reply_fails_at_its_deadline(
    context, endpoint, running, hold
) -> None:
    server = serve(context, endpoint, hold)
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        await client.ask(Ping(), timeout_s=20)  # connected
        with pytest.raises(RequestTimeout) as failure:
            await client.ask(Ask(), timeout_s=0.05)
        await client.ask(Ping(), timeout_s=20)  # the server has read what was asked before
        hold.calls[0].reply(Echoed())
        await client.ask(Ping(), timeout_s=20)

    assert failure.value.code is ErrorCode.TIMEOUT
    assert client.counters.late_replies == 1


async def test_requests_to_nobody_time_out_and_leave_nothing_behind(
    context, endpoint, running
) -> None:
    client = RequestClient(context, endpoint, boot="client")

    async with running(client):
        with pytest.raises(RequestTimeout):
            await client.ask(Ask(), timeout_s=0.05)

    assert client.num_pending == 0
    assert not client._unsent


async def test_a_refusal_arrives_with_code_message_and_detail(context, endpoint, running) -> None:
    def handle(_: Ask, call: Call) -> None:
        call.refuse(KVBusError("lease is over", code=ErrorCode.LEASE_EXPIRED, epoch=7))

    server = serve(context, endpoint, handle)
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        with pytest.raises(RequestRefused) as failure:
            await client.ask(Ask(), timeout_s=20)

    assert failure.value.code is ErrorCode.LEASE_EXPIRED
    assert failure.value.message == "lease is over"
    assert failure.value.detail == {"epoch": 7}


async def test_a_call_is_not_answered_twice(context, endpoint, running, hold) -> None:
    server = serve(context, endpoint, hold)
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client), anyio.create_task_group() as tasks:
        tasks.start_soon(hold.echo_next)
        await client.ask(Ask(), timeout_s=20)
        with pytest.raises(LocalError, match="answered before"):
            hold.calls[0].reply(Echoed())


async def test_a_fault_in_the_handler_fails_its_request_alone(context, endpoint, running) -> None:
    faults: list[tuple[Exception, Call]] = []

    def handle(asked: Ask, call: Call) -> None:
        if asked.text == "bad":
            raise RuntimeError("oops")
        echo(asked, call)

    server = serve(
        context,
        endpoint,
        handle,
        on_fault=lambda error, call: faults.append((error, call)),
    )
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        with pytest.raises(RequestRefused) as failure:
            await client.ask(Ask(text="bad"), timeout_s=20)
        good = await client.ask(Ask(number=1), timeout_s=20)

    assert failure.value.code is ErrorCode.INTERNAL
    assert "oops" not in failure.value.message
    assert [(str(error), call.op) for error, call in faults] == [("oops", "ask")]
    assert good == Echoed(number=1)


async def test_a_fault_that_nobody_takes_ends_the_server(context, endpoint, running) -> None:
    def handle(_: Ask, call: Call) -> None:
        raise RuntimeError("oops")

    server = serve(context, endpoint, handle)
    client = RequestClient(context, endpoint, boot="client")

    with pytest.raises(ExceptionGroup) as failure:
        async with running(server, client):
            await client.ask(Ask(text="bad"), timeout_s=20)
    assert failure.group_contains(RuntimeError, match="oops")


@pytest.mark.parametrize(
    ("fill", "code"),
    [(object(), ErrorCode.INTERNAL), (bytes(MAX_FRAME_BYTES), ErrorCode.TOO_LARGE)],
)
async def test_a_reply_that_cannot_be_sent_becomes_an_error_reply_and_a_fault(
    context, endpoint, running, fill, code
) -> None:
    faults: list[Exception] = []
    server = serve(
        context,
        endpoint,
        lambda _, call: call.reply(Echoed(fill=fill)),
        on_fault=lambda error, _: faults.append(error),
    )
    client = RequestClient(context, endpoint, boot="client")

    async with running(server, client):
        with pytest.raises(RequestRefused) as failure:
            await client.ask(Ask(), timeout_s=20)

    assert failure.value.code is code
    assert len(faults) == 1


async def test_a_cancelled_caller_loses_nobody_elses_message(
    context, endpoint, running, hold
) -> None:
    server = serve(context, endpoint, hold)
    client = RequestClient(context, endpoint, boot="client")

    async def ask(number: int) -> None:
        await client.ask(Ask(number=number), timeout_s=30)

    async with running(server, client):
        for number in range(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, number)
                call = await hold.arrived.get()
                call.reply(Echoed())
                tasks.cancel_scope.cancel()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold.echo_next)
                assert await client.ask(Ask(number=number), timeout_s=30) == Echoed(number=number)

    assert client.num_pending == server.num_pending == 0


async def test_a_fault_in_a_reply_callback_fails_alone(context, endpoint, running) -> None:
    faults: list[Exception] = []
    server = serve(context, endpoint)
    client = RequestClient(context, endpoint, boot="client", on_fault=faults.append)

    def fail(_: object) -> None:
        raise RuntimeError("oops")

    async with running(server, client):
        client.send(Ask(), timeout_s=30, on_reply=fail)
        reply = await client.ask(Ask(number=1), timeout_s=30)

    assert [str(fault) for fault in faults] == ["oops"]
    assert reply == Echoed(number=1)


async def test_a_reply_that_makes_no_sense_fails_its_request_alone(
    context, endpoint, running, raw_peer
) -> None:
    server = raw_peer(zmq.ROUTER, endpoint)
    client = RequestClient(context, endpoint, boot="client", ping_s=30)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(client):
        for number in ("one", 2):
            request_id = client.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
            identity, _ = await server.frames()
            reply = {"v": 1, "re": request_id, "boot": "server", "ok": {"number": number}}
            server.put(reply, identity)
        wrong, right = await outcomes.get(), await outcomes.get()

    assert wrong.code is ErrorCode.INVALID
    assert right == Echoed(number=2)
