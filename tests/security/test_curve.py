"""Sockets with CURVE keys: who has no key, or one that is not let in, gets nothing at all."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import zmq

from kvbus.bus import (
    Applicant,
    ClientCurve,
    EventPublisher,
    EventSubscriber,
    KeyCheck,
    KeyPair,
    RequestClient,
    ServerCurve,
    SocketOptions,
    new_context,
    new_key_pair,
)
from kvbus.errors import ErrorCode, RemoteError
from kvbus.protocol import Heartbeat
from tests.agents import until
from tests.bus.conftest import Hold, Record
from tests.bus.messages import Ask, Echoed, serve

pytestmark = pytest.mark.anyio

ANY = "tcp://127.0.0.1:0"
SERVER, READER, STRANGER = new_key_pair(), new_key_pair(), new_key_pair()


class Door:
    """Lets in keys of a set, and records who asked."""

    def __init__(self, *keys: KeyPair) -> None:
        self.keys = {pair.public for pair in keys}
        self.asked: list[Applicant] = []

    async def __call__(self, applicant: Applicant) -> bool:
        self.asked.append(applicant)
        return applicant.key in self.keys


def bound(domain: str = "peer") -> SocketOptions:
    return SocketOptions(curve=ServerCurve(SERVER, domain))


def connected(keys: KeyPair, server: KeyPair = SERVER) -> SocketOptions:
    return SocketOptions(curve=ClientCurve(keys, server.public))


def asker(context: Any, endpoint: str, keys: KeyPair, **options: Any) -> RequestClient:
    return RequestClient(
        context, endpoint, boot=keys.public, options=connected(keys, **options), retry_s=0.05
    )


async def test_a_key_that_is_let_in_asks_and_one_that_is_not_is_told(context, running) -> None:
    door = Door(READER)
    check, server = KeyCheck(context, door), serve(context, ANY, options=bound())
    reader = asker(context, server.endpoint, READER)
    stranger = asker(context, server.endpoint, STRANGER)

    async with running(check, server, reader, stranger):
        reply = await reader.ask(Ask(number=3), timeout_s=30)
        with pytest.raises(RemoteError, match="refused our key") as refused:
            await stranger.ask(Ask(), timeout_s=30)

    assert reply == Echoed(number=3)
    assert refused.value.code is ErrorCode.FORBIDDEN
    assert {(one.address, one.domain) for one in door.asked} == {("127.0.0.1", "peer")}
    assert server.counters.requests == 1


async def test_a_refused_key_that_is_trusted_later_gets_in_by_itself(context, running) -> None:
    door = Door()
    check, server = KeyCheck(context, door), serve(context, ANY, options=bound())
    reader = asker(context, server.endpoint, READER)

    async with running(check, server, reader):
        with pytest.raises(RemoteError, match="refused our key"):
            await reader.ask(Ask(), timeout_s=30)
        door.keys.add(READER.public)
        await until(lambda: reader._connection.refusal is None)
        reply = await reader.ask(Ask(number=1), timeout_s=30)

    assert reply == Echoed(number=1)


async def test_a_client_without_keys_is_told_that_the_server_has_some(context, running) -> None:
    check, server = KeyCheck(context, Door(READER)), serve(context, ANY, options=bound())
    client = RequestClient(context, server.endpoint, boot="client")

    async with running(check, server, client):
        with pytest.raises(RemoteError, match="uses keys") as refused:
            await client.ask(Ask(), timeout_s=30)

    assert refused.value.code is ErrorCode.FORBIDDEN


async def test_a_server_without_keys_is_not_spoken_to_by_a_client_that_knows_its_key(
    context, running
) -> None:
    server = serve(context, ANY)
    client = asker(context, server.endpoint, READER)

    async with running(server, client):
        with pytest.raises(RemoteError, match="uses no keys"):
            await client.ask(Ask(), timeout_s=30)

    assert server.counters.requests == 0


async def test_a_server_with_another_key_than_the_known_one_is_told_apart(context, running) -> None:
    check, server = KeyCheck(context, Door(READER)), serve(context, ANY, options=bound())
    client = asker(context, server.endpoint, READER, server=STRANGER)

    async with running(check, server, client):
        with pytest.raises(RemoteError, match="another server key") as unreachable:
            await client.ask(Ask(), timeout_s=30)

    assert unreachable.value.code is ErrorCode.PEER_UNREACHABLE
    assert server.counters.requests == 0


async def test_nobody_is_let_in_while_nobody_checks_keys(context, running) -> None:
    """Without a handler libzmq lets every key in, unless it is told to enforce."""
    server = serve(context, ANY, options=bound())
    client = asker(context, server.endpoint, STRANGER)

    async with running(server, client):
        with pytest.raises(RemoteError):
            await client.ask(Ask(), timeout_s=1)

    assert server.counters.requests == 0


@pytest.mark.parametrize("keys", [None, STRANGER])
async def test_a_stranger_hears_no_events(context, running, record, keys) -> None:
    check = KeyCheck(context, Door(READER))
    publisher = EventPublisher(context, ANY, boot="p", heartbeat_s=0.02, options=bound("events"))
    subscriber = EventSubscriber(context, record, silence_s=0.2, keys=keys)
    subscriber.add(publisher.endpoint, server_key=SERVER.public if keys else "")
    reader = EventSubscriber(context, Record(), keys=READER)
    reader.add(publisher.endpoint, server_key=SERVER.public)

    async with running(check, publisher, reader, subscriber):
        await until(lambda: reader.counters.heartbeats >= 3)
        told = await record.next()

    assert told == ("silence", publisher.endpoint, None)
    assert subscriber.counters.heartbeats == 0


async def test_who_is_not_let_in_any_more_hears_nothing_after_a_hang_up_and_others_do(
    context, running
) -> None:
    door, heard = Door(READER, STRANGER), (Record(), Record())
    check = KeyCheck(context, door)
    publisher = EventPublisher(context, ANY, boot="p", heartbeat_s=0.02, options=bound("events"))
    subscribers = [
        EventSubscriber(context, record, keys=keys)
        for record, keys in zip(heard, (READER, STRANGER), strict=True)
    ]
    for subscriber in subscribers:
        subscriber.add(publisher.endpoint, server_key=SERVER.public)
    stays, goes = subscribers

    async with running(check, publisher, *subscribers):
        await until(lambda: stays.counters.heartbeats and goes.counters.heartbeats)
        door.keys.remove(STRANGER.public)
        num_asked = len(door.asked)
        publisher.hang_up()
        await until(lambda: {one.key for one in door.asked[num_asked:]} >= {READER.public})
        await until(lambda: STRANGER.public in {one.key for one in door.asked[num_asked:]})
        before, gone = stays.counters.heartbeats, goes.counters.heartbeats
        await until(lambda: stays.counters.heartbeats >= before + 10)

    assert goes.counters.heartbeats == gone
    assert publisher.publish(Heartbeat.op + "s", Heartbeat(seqs={}, uptime_s=0)) == 1


async def test_a_session_belongs_to_the_key_of_its_connection(context, running) -> None:
    """The same boot id and secret under another key are another sender."""
    keys = (READER, STRANGER)
    check, server = KeyCheck(context, Door(*keys)), serve(context, ANY, options=bound())
    frame = {"v": 1, "op": "ask", "id": 1, "boot": "same", "secret": "same"}

    async with running(check, server):
        with new_context() as other:
            replies = [
                await raw_ask(other, server.endpoint, keys[n], {**frame, "body": {"number": n}})
                for n in (0, 1, 0, 1)
            ]

    assert [reply["ok"]["number"] for reply in replies] == [0, 1, 0, 1]
    assert server.counters.repeats_answered == 2


async def test_the_calls_and_kept_replies_of_a_key_end_with_it(context, running) -> None:
    hold, outcomes = Hold(), asyncio.Queue[Any]()
    check, server = (
        KeyCheck(context, Door(READER, STRANGER)),
        serve(context, ANY, hold, options=bound()),
    )
    revoked = asker(context, server.endpoint, STRANGER)
    reader = asker(context, server.endpoint, READER)

    async with running(check, server, revoked, reader):
        revoked.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        await hold.arrived.get()
        server.end_key(STRANGER.public)
        refused = await outcomes.get()
        hold.calls[0].reply(Echoed())  # who was at it does not know
        reader.send(Ask(number=5), timeout_s=30, on_reply=outcomes.put_nowait)
        await hold.echo_next()
        reply = await outcomes.get()

    assert (refused.code, reply) == (ErrorCode.FORBIDDEN, Echoed(number=5))
    assert [session.sender.key for session in server.sessions] == [READER.public]


async def raw_ask(
    context: Any, endpoint: str, keys: KeyPair, fields: dict[str, Any]
) -> dict[str, Any]:
    """What a plain DEALER with these keys is answered."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        ClientCurve(keys, SERVER.public).apply(dealer)
        dealer.connect(endpoint)
        dealer.send(msgpack.packb(fields))
        done: list[bytes] = []
        await until(received(dealer, done))
        return dict(msgpack.unpackb(done[0]))


def received(dealer: Any, done: list[bytes]) -> Callable[[], bool]:
    def look() -> bool:
        if dealer.poll(0):
            done.append(dealer.recv())
        return bool(done)

    return look
