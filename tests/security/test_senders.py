"""A boot id that others have heard is not enough to speak or to hear in its name."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from kvbus.bus import BusContext, Call, RequestClient
from kvbus.engine import PrefillSession
from tests.agents import Agents
from tests.bus.conftest import Hold, RawPeer, Running
from tests.bus.messages import Ask, Echoed, serve
from tests.engines import engine
from tests.plain_sockets import ask

pytestmark = pytest.mark.anyio

MakePeer = Callable[..., RawPeer]
BOOT = "victim"
OWN = {"secret": "victim's own"}


def request(request_id: int, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"v": 1, "op": "ask", "id": request_id, "boot": BOOT, "body": {"number": number}, **more}


def double(asked: Ask, call: Call) -> None:
    call.reply(Echoed(number=2 * asked.number))


@pytest.mark.parametrize(
    "shown",
    [({}, {}), ({}, {"secret": "x"}), (OWN, {}), (OWN, {"secret": ""}), (OWN, {"secret": "x"})],
)
async def test_the_kept_replies_of_a_victim_are_not_replayed_to_a_stranger(
    context: BusContext,
    endpoint: str,
    running: Running,
    raw_peer: MakePeer,
    shown: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    victims, secret = shown
    server = serve(context, endpoint, double)
    stranger, victim = raw_peer(zmq.DEALER, endpoint), raw_peer(zmq.DEALER, endpoint)

    async with running(server):
        victim.put(request(1, number=21, **victims))
        told = await victim.get()
        stranger.put(request(1, **secret))
        overheard = await stranger.get()
        victim.put(request(1, number=21, **victims))
        repeated = await victim.get()

    assert overheard["ok"]["number"] == 0
    assert repeated == told
    assert server.counters.repeats_answered == 1


async def test_a_reply_comes_to_a_new_connection_that_shows_the_secret(
    context: BusContext, endpoint: str, running: Running, raw_peer: MakePeer
) -> None:
    server = serve(context, endpoint, double)
    first, second = raw_peer(zmq.DEALER, endpoint), raw_peer(zmq.DEALER, endpoint)
    asked = request(1, number=21, secret="my own")

    async with running(server):
        first.put(asked)
        told = await first.get()
        first.socket.close()
        second.put(asked)
        repeated = await second.get()

    assert repeated == told
    assert server.counters.repeats_answered == 1


async def test_a_stranger_neither_gets_nor_holds_up_what_is_sent_to_a_victim(
    context: BusContext, endpoint: str, running: Running, raw_peer: MakePeer
) -> None:
    """Its requests under the victim's boot id used to move the whole session to it."""
    hold, notices = Hold(), asyncio.Queue[Any]()
    server = serve(context, endpoint, hold)
    client = RequestClient(context, endpoint, boot=BOOT, on_notice=notices.put_nowait, ping_s=30)
    stranger = raw_peer(zmq.DEALER, endpoint)
    outcomes: asyncio.Queue[Any] = asyncio.Queue()

    async with running(server, client):
        client.send(Ask(number=1), timeout_s=30, on_reply=outcomes.put_nowait)
        call = await hold.arrived.get()
        stranger.put(request(2**63) | {"op": "ping"})
        pong = await stranger.get()
        call.reply(Echoed(number=1))
        call.session.notify("n", {"number": 7})
        reply, notice = await outcomes.get(), await notices.get()
        stranger.put(request(2**63 + 1) | {"op": "ping"})
        next_heard = await stranger.get()

    assert pong["ok"] == {}
    assert (reply, notice.body["number"]) == (Echoed(number=1), 7)
    assert next_heard["re"] == 2**63 + 1


async def test_request_ids_begin_where_nobody_guesses(
    context: BusContext, endpoint: str, running: Running, raw_peer: MakePeer
) -> None:
    server = raw_peer(zmq.ROUTER, endpoint)
    clients = [RequestClient(context, endpoint, boot=f"{n}", ping_s=30) for n in range(8)]

    async with running(*clients):
        for client in clients:
            client.send(Ask(), timeout_s=30, on_reply=lambda _: None)
        asked = [await server.get() for _ in clients]

    assert len({frame["id"] >> 20 for frame in asked}) == len(clients)
    assert all(0 < frame["id"] < 2**53 for frame in asked)
    assert len({frame["secret"] for frame in asked}) == len(clients)


async def test_another_process_cannot_offer_in_the_name_of_an_engine(fresh: Agents) -> None:
    agent = fresh.prepare("prefill")
    fresh.start(agent)
    socket = f"ipc://{agent.settings['runtime_dir']}/engine.sock"

    async with engine(PrefillSession, agent.attach) as source:
        blocks = source.some_blocks(1, 32)
        stolen: dict[str, Any] = {"boot": source.prefill.boot, "id": 1}
        body = {"request_id": "r", "num_tokens": 0, "tables": {}, "sealed": True, "ttl_s": 0.0}
        refusals = [
            ask(socket, op, body, **stolen)["error"]["code"]
            for op in ("offer", "seal", "withdraw", "detach", "ready")
        ]
        offer = await source.prefill.offer("r", num_tokens=32, block_ids=blocks)
        await offer.withdraw()
        await offer.released()

    assert refusals == ["not_registered"] * 5
