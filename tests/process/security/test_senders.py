"""A boot id that others have heard is not enough to speak or to hear in its name."""

import asyncio
import socket
from typing import Any

import pytest
import zmq

from kvbus.bus import is_of_same_user
from tests.support.agents import AgentProcess
from tests.support.engines import engine
from tests.support.plain_sockets import ask, engine_socket
from tests.unit.bus.conftest import Bus, Hold
from tests.unit.bus.messages import Ask, Echoed

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
