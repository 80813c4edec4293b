"""Notices come in order; a peer that does not read what it is sent is given up at once."""

import pytest
import zmq

from kvbus.bus import SocketOptions
from tests.unit.bus.conftest import Bus, Hold
from tests.unit.bus.messages import Ask, Echoed, asked, session_of

pytestmark = pytest.mark.anyio

NUM_NOTICES = 500
SMALL = SocketOptions(hwm=4)


async def test_notices_arrive_in_order_between_surrounding_replies(bus: Bus) -> None:
    received: list[int] = []

    async with bus.pair(on_notice=lambda one: received.append(one.seq)) as (server, client):
        await client.ask(Ask(), timeout_s=30)
        for _ in range(NUM_NOTICES):
            session_of(server, "client").notify("n", {})
        await client.ask(Ask(), timeout_s=30)

    assert received == list(range(1, NUM_NOTICES + 1))


@pytest.mark.parametrize("sent", ["notices", "answers"])
async def test_a_peer_that_does_not_read_is_given_up_and_no_other(
    bus: Bus, hold: Hold, sent: str
) -> None:
    server, peer, client = bus.server(hold, options=SMALL), bus.raw(zmq.DEALER), bus.client()
    fill, unread = bytes(1 << 20), list[str]()

    async with bus.running(server, client):
        for request_id in range(1, 65):
            peer.put(asked(request_id))
            await hold.arrived.get()
        session_of(server, "raw").on_unread = lambda: unread.append("raw")
        for call in hold.calls:
            if sent == "notices":
                call.session.notify("n", {"fill": fill})
            else:
                call.reply(Echoed(fill=fill))
        client.send(Ask(number=1), timeout_s=30, on_reply=lambda _: None)
        await hold.arrived.get()
        session_of(server, "client").on_unread = lambda: unread.append("client")
        hold.calls[-1].session.notify("n", {})

    assert set(unread) == {"raw"}


async def test_a_session_that_was_forgotten_is_not_notified(bus: Bus) -> None:
    received: list[int] = []

    async with bus.pair(on_notice=lambda one: received.append(one.seq)) as (server, client):
        await client.ask(Ask(), timeout_s=30)
        session = session_of(server, "client")
        session.on_unread = lambda: received.append(-1)
        server.sessions.end_boot("client")
        session.notify("n", {})

    assert received == []
