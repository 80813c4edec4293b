"""Sockets with CURVE keys: who has no key, or one that is not let in, gets nothing at all."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
import zmq

from kvbus.bus import (
    Call,
    ClientCurve,
    KeyPair,
    RequestClient,
    ServerCurve,
    SocketOptions,
    ZapHandler,
    ZapRequest,
    new_key_pair,
)
from kvbus.errors import ErrorCode, RemoteError
from tests.unit.bus.conftest import TCP, Bus, Hold
from tests.unit.bus.messages import Ask, Echoed, asked

pytestmark = pytest.mark.anyio

SERVER, READER, STRANGER = new_key_pair(), new_key_pair(), new_key_pair()
WITH_KEYS = SocketOptions(curve=ServerCurve(SERVER, "peer"))


class Door:
    """Lets in keys of a set, and records who asked."""

    def __init__(self, *keys: KeyPair) -> None:
        self.keys = {pair.public for pair in keys}
        self.asked: list[ZapRequest] = []

    async def __call__(self, applicant: ZapRequest) -> bool:
        self.asked.append(applicant)
        return applicant.key in self.keys


def asker(bus: Bus, at: str, keys: KeyPair | None, server: KeyPair = SERVER) -> RequestClient:
    curve = ClientCurve(keys, server.public) if keys is not None else None
    boot = keys.public if keys is not None else "no key"
    return bus.client(boot, at, options=SocketOptions(curve=curve))


@dataclass(frozen=True)
class Wrong:
    """A client's keys, what it takes the server's to be, and what it is told."""

    said: str
    keys: KeyPair | None = READER
    server: KeyPair = SERVER
    served: SocketOptions | None = WITH_KEYS
    code: ErrorCode = ErrorCode.FORBIDDEN


WRONG = [
    Wrong("refused our key", keys=STRANGER),
    Wrong("uses keys", keys=None),
    Wrong("uses no keys", served=None),
    Wrong("another server key", server=STRANGER, code=ErrorCode.PEER_UNREACHABLE),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.said)
async def test_a_client_that_is_not_let_in_is_told_why(bus: Bus, hold: Hold, wrong: Wrong) -> None:
    door, served = Door(READER), bus.server(hold, TCP, options=wrong.served)
    client = asker(bus, served.endpoint, wrong.keys, wrong.server)

    async with bus.running(ZapHandler(bus.context, door), served, client):
        with pytest.raises(RemoteError, match=wrong.said) as refused:
            await client.ask(Ask(), timeout_s=30)

    assert refused.value.code is wrong.code
    assert not hold.calls
    assert {(one.address, one.domain) for one in door.asked} <= {("127.0.0.1", "peer")}


async def test_a_session_belongs_to_the_key_of_its_connection(bus: Bus) -> None:
    """The same boot id and secret under another key are another sender."""
    server = bus.server(at=TCP, options=WITH_KEYS)
    peers = []
    for keys in (READER, STRANGER):
        peers.append(bus.raw(zmq.DEALER, server.endpoint, curve=ClientCurve(keys, SERVER.public)))

    async with bus.running(ZapHandler(bus.context, Door(READER, STRANGER)), server):
        replies = [await peers[n].ask(asked(1, "same", number=n)) for n in (0, 1, 0, 1)]

    assert [reply["ok"]["number"] for reply in replies] == [0, 1, 0, 1]
    assert len(server.sessions) == 2


async def test_the_calls_of_a_key_end_with_it(bus: Bus, hold: Hold) -> None:
    outcomes: asyncio.Queue[Any] = asyncio.Queue()
    check = ZapHandler(bus.context, Door(READER, STRANGER))
    server = bus.server(hold, TCP, options=WITH_KEYS)
    revoked, reader = (asker(bus, server.endpoint, keys) for keys in (STRANGER, READER))

    async with bus.running(check, server, revoked, reader):
        revoked.send(Ask(), timeout_s=30, on_reply=outcomes.put_nowait)
        await hold.arrived.get()
        server.end_key(STRANGER.public)
        refused = await outcomes.get()
        hold.calls[0].reply(Echoed())  # who was at it does not know
        reader.send(Ask(number=5), timeout_s=30, on_reply=outcomes.put_nowait)
        await hold.echo_next()
        reply = await outcomes.get()

    assert (refused.code, reply) == (ErrorCode.FORBIDDEN, Echoed(number=5))
    assert [session.key for session in server.sessions] == [READER.public]


async def test_refused_key_enters_once_trusted_none_while_unchecked(bus: Bus, hold: Hold) -> None:
    """Without a handler libzmq lets every key in, unless it is told to enforce."""

    def serve(one: Ask, call: Call) -> None:
        hold(one, call)
        call.reply(Echoed(number=one.number))

    door, server = Door(), bus.server(serve, TCP, options=WITH_KEYS)
    reader = asker(bus, server.endpoint, READER)
    reply = None

    async with bus.running(server, reader):
        with pytest.raises(RemoteError):
            await reader.ask(Ask(), timeout_s=1)
        async with bus.running(ZapHandler(bus.context, door)):
            with pytest.raises(RemoteError, match="refused our key"):
                await reader.ask(Ask(), timeout_s=30)
            num_served = len(hold.calls)
            door.keys.add(READER.public)
            with anyio.fail_after(60):
                while reply is None:
                    with suppress(RemoteError):
                        reply = await reader.ask(Ask(number=1), timeout_s=30)
                    await anyio.sleep(0.02)

    assert (num_served, reply) == (0, Echoed(number=1))
