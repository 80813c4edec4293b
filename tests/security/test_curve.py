"""Sockets with CURVE keys: who has no key, or one that is not let in, gets nothing at all."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import msgpack
import pytest
import zmq

from kvbus.bus import (
    Applicant,
    BusContext,
    ClientCurve,
    KeyCheck,
    KeyPair,
    RequestClient,
    ServerCurve,
    SocketOptions,
    new_context,
    new_key_pair,
)
from kvbus.errors import ErrorCode, RemoteError
from tests.agents import until
from tests.bus.conftest import Hold, Running
from tests.bus.messages import Ask, Echoed, serve

pytestmark = pytest.mark.anyio

ANY = "tcp://127.0.0.1:0"
SERVER, READER, STRANGER = new_key_pair(), new_key_pair(), new_key_pair()
WITH_KEYS = SocketOptions(curve=ServerCurve(SERVER, "peer"))


class Door:
    """Lets in keys of a set, and records who asked."""

    def __init__(self, *keys: KeyPair) -> None:
        self.keys = {pair.public for pair in keys}
        self.asked: list[Applicant] = []

    async def __call__(self, applicant: Applicant) -> bool:
        self.asked.append(applicant)
        return applicant.key in self.keys


def asker(
    context: BusContext, at: str, keys: KeyPair | None, *, server: KeyPair = SERVER
) -> RequestClient:
    curve = ClientCurve(keys, server.public) if keys is not None else None
    boot = keys.public if keys is not None else "no key"
    return RequestClient(context, at, boot=boot, options=SocketOptions(curve=curve), retry_s=0.05)


@dataclass(frozen=True)
class Wrong:
    """A client's keys, what it takes the server's to be, and what it is told."""

    said: str
    keys: KeyPair | None = READER
    server: KeyPair = SERVER
    served: SocketOptions | None = WITH_KEYS
    code: ErrorCode = ErrorCode.FORBIDDEN


REFUSED = Wrong("refused our key", keys=STRANGER)
WITHOUT = Wrong("uses keys", keys=None)
UNKNOWN = Wrong("uses no keys", served=None)
ANOTHER = Wrong("another server key", server=STRANGER, code=ErrorCode.PEER_UNREACHABLE)


@pytest.mark.parametrize(
    "wrong", [REFUSED, WITHOUT, UNKNOWN, ANOTHER], ids=lambda wrong: wrong.said
)
async def test_a_client_that_is_not_let_in_is_told_why(
    context: BusContext,
    running: Running,
    wrong: Wrong,
) -> None:
    door = Door(READER)
    check = KeyCheck(context, door)
    served = serve(context, ANY, options=wrong.served)
    client = asker(context, served.endpoint, wrong.keys, server=wrong.server)

    async with running(check, served, client):
        with pytest.raises(RemoteError, match=wrong.said) as refused:
            await client.ask(Ask(), timeout_s=30)

    assert refused.value.code is wrong.code
    assert served.counters.requests == 0
    assert {(one.address, one.domain) for one in door.asked} <= {("127.0.0.1", "peer")}


async def test_a_refused_key_that_is_trusted_later_gets_in_by_itself(
    context: BusContext, running: Running
) -> None:
    door = Door()
    check, server = KeyCheck(context, door), serve(context, ANY, options=WITH_KEYS)
    reader = asker(context, server.endpoint, READER)

    async with running(check, server, reader):
        with pytest.raises(RemoteError, match="refused our key"):
            await reader.ask(Ask(), timeout_s=30)
        door.keys.add(READER.public)
        reply = None
        with anyio.fail_after(60):
            while reply is None:
                with suppress(RemoteError):
                    reply = await reader.ask(Ask(number=1), timeout_s=30)
                await anyio.sleep(0.02)

    assert reply == Echoed(number=1)


async def test_nobody_is_let_in_while_nobody_checks_keys(
    context: BusContext, running: Running
) -> None:
    """Without a handler libzmq lets every key in, unless it is told to enforce."""
    server = serve(context, ANY, options=WITH_KEYS)
    client = asker(context, server.endpoint, STRANGER)

    async with running(server, client):
        with pytest.raises(RemoteError):
            await client.ask(Ask(), timeout_s=1)

    assert server.counters.requests == 0


async def test_a_session_belongs_to_the_key_of_its_connection(
    context: BusContext, running: Running
) -> None:
    """The same boot id and secret under another key are another sender."""
    keys = (READER, STRANGER)
    check, server = KeyCheck(context, Door(*keys)), serve(context, ANY, options=WITH_KEYS)
    frame = {"v": 1, "op": "ask", "id": 1, "boot": "same", "secret": "same"}

    async with running(check, server):
        with new_context() as other:
            replies = [
                await raw_ask(other, server.endpoint, keys[n], {**frame, "body": {"number": n}})
                for n in (0, 1, 0, 1)
            ]

    assert [reply["ok"]["number"] for reply in replies] == [0, 1, 0, 1]
    assert server.counters.repeats_answered == 2


async def test_the_calls_and_kept_replies_of_a_key_end_with_it(
    context: BusContext, running: Running
) -> None:
    hold, outcomes = Hold(), asyncio.Queue[Any]()
    check = KeyCheck(context, Door(READER, STRANGER))
    server = serve(context, ANY, hold, options=WITH_KEYS)
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
    context: BusContext, endpoint: str, keys: KeyPair, fields: dict[str, Any]
) -> dict[str, Any]:
    """What a plain DEALER with these keys is answered."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        ClientCurve(keys, SERVER.public).apply(dealer)
        dealer.connect(endpoint)
        dealer.send(msgpack.packb(fields))
        await until(lambda: dealer.poll(0))
        return dict(msgpack.unpackb(dealer.recv()))
