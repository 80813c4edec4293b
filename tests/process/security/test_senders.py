"""A connection, a boot id and a session belong to one key and one sender."""

import asyncio
import socket
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
    is_of_same_user,
    new_key_pair,
)
from kvbus.errors import ErrorCode, RemoteError
from tests.support.agents import AgentProcess
from tests.support.engines import engine
from tests.support.plain_sockets import ask, engine_socket
from tests.unit.bus.conftest import TCP, Bus, Hold
from tests.unit.bus.messages import Ask, Echoed, asked

pytestmark = pytest.mark.anyio

BOOT = "victim"
OWN = {"secret": "victim's own"}


def request(request_id: int, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"v": 1, "op": "ask", "id": request_id, "boot": BOOT, "body": {"number": number}, **more}


@pytest.mark.parametrize(
    "shown",
    [({}, {}), ({}, {"secret": "x"}), (OWN, {}), (OWN, {"secret": ""}), (OWN, {"secret": "x"})],
)
async def test_what_a_victim_waits_for_does_not_go_to_a_stranger(
    bus: Bus, hold: Hold, shown: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    victims, secret = shown
    server = bus.server(hold)
    stranger, victim = bus.raw(zmq.DEALER), bus.raw(zmq.DEALER)
    async with bus.running(server):
        victim.put(request(1, number=21, **victims))
        await hold.arrived.get()
        stranger.put(request(1, **secret))
        await hold.arrived.get()
        for asked, call in zip(hold.asked, hold.calls, strict=True):
            call.reply(Echoed(number=asked.number))
        overheard, told = await stranger.get(), await victim.get()
    assert (told["ok"]["number"], overheard["ok"]["number"]) == (21, 0)


async def test_stranger_neither_gets_nor_delays_messages_to_victim(bus: Bus, hold: Hold) -> None:
    """Its requests under the victim's boot id used to move the whole session to it."""
    stranger, notices, outcomes = bus.raw(zmq.DEALER), asyncio.Queue[Any](), asyncio.Queue[Any]()
    async with bus.pair(hold, boot=BOOT, on_notice=notices.put_nowait, ping_s=30) as (_, client):
        client.send(Ask(number=1), timeout_s=30, on_reply=outcomes.put_nowait)
        call = await hold.arrived.get()
        pong = await stranger.ask(request(2**63) | {"op": "ping"})
        call.reply(Echoed(number=1))
        call.session.notify("n", {"number": 7})
        reply, notice = await outcomes.get(), await notices.get()
        next_heard = await stranger.ask(request(2**63 + 1) | {"op": "ping"})
    assert pong["ok"] == {}
    assert (reply, notice.body["number"]) == (Echoed(number=1), 7)
    assert next_heard["re"] == 2**63 + 1


async def test_request_ids_begin_where_nobody_guesses(bus: Bus) -> None:
    server = bus.raw(zmq.ROUTER)
    clients = [bus.client(f"{n}", ping_s=30) for n in range(8)]
    async with bus.running(*clients):
        for client in clients:
            client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        asked = [await server.get() for _ in clients]
    assert len({frame["id"] >> 20 for frame in asked}) == len(clients)
    assert all(0 < frame["id"] < 2**53 for frame in asked)
    assert len({frame["secret"] for frame in asked}) == len(clients)


async def test_another_process_cannot_offer_in_the_name_of_an_engine(prefill: AgentProcess) -> None:
    async with engine(prefill.attach) as source:
        stolen: dict[str, Any] = {"boot": source.control.connection.boot, "id": 1}
        body = {"request_id": "r", "num_tokens": 0, "tables": {}, "sealed": True, "ttl_s": 0.0}
        refusals = [
            ask(engine_socket(prefill.attach), op, body, **stolen)["error"]["code"]
            for op in ("offer", "seal", "withdraw", "detach", "ready")
        ]
        offer = await source.prefill.offer("r", num_tokens=32, block_ids=source.some_blocks(1, 32))
        await offer.withdraw()
        await offer.ended
    assert refusals == ["not_registered"] * 5


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_process_of_the_same_user_is_known_until_it_hangs_up(family: int, host: str) -> None:
    with socket.create_server((host, 0), family=family) as server:
        with socket.create_connection(server.getsockname()[:2]):
            accepted, _ = server.accept()
            assert is_of_same_user(accepted.fileno())
        with accepted:
            assert not is_of_same_user(accepted.fileno())


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
    """The keys of a client, the server key that it expects, and its error."""

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
            await client.request(Ask(), timeout_s=30)
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
    """Without a handler libzmq admits every key, unless it must enforce a domain."""

    def serve(one: Ask, call: Call) -> None:
        hold(one, call)
        call.reply(Echoed(number=one.number))

    door, server = Door(), bus.server(serve, TCP, options=WITH_KEYS)
    reader = asker(bus, server.endpoint, READER)
    reply = None
    async with bus.running(server, reader):
        with pytest.raises(RemoteError):
            await reader.request(Ask(), timeout_s=1)
        async with bus.running(ZapHandler(bus.context, door)):
            with pytest.raises(RemoteError, match="refused our key"):
                await reader.request(Ask(), timeout_s=30)
            num_served = len(hold.calls)
            door.keys.add(READER.public)
            with anyio.fail_after(60):
                while reply is None:
                    with suppress(RemoteError):
                        reply = await reader.request(Ask(number=1), timeout_s=30)
                    await anyio.sleep(0.02)
    assert (num_served, reply) == (0, Echoed(number=1))
