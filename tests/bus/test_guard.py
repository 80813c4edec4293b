"""The guard ends connections that are over a bound, and no others, whatever those do."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import anyio
import msgpack
import pytest

from kvbus.bus import (
    Call,
    ClientCurve,
    ConnectionGuard,
    DoorLimits,
    Ended,
    EventPublisher,
    KeyCheck,
    RequestClient,
    ServerCurve,
    SocketOptions,
    door,
    guard,
    new_key_pair,
)
from kvbus.bus.accepted import counted_by, is_of_same_user
from kvbus.bus.door import EndReason
from kvbus.protocol import Ping
from tests.agents import WITHIN_S, until
from tests.bus.messages import Ask, Echoed, serve
from tests.security.wire import address_of, connected, frame, send_until_cut

pytestmark = pytest.mark.anyio
KIB = 1024
PING = {"v": 1, "op": "ping", "id": 1, "boot": "raw", "secret": "s", "body": {}}


@dataclass
class Guarded:
    """A guard that runs, and what it has ended."""

    guard: ConnectionGuard
    ended: list[EndReason] = field(default_factory=list)

    def watch(self, **limits: Any) -> Callable[..., Any]:
        return lambda one: self.guard.watch(one, "tested", DoorLimits(**limits))

    def has_ended(self, *reasons: EndReason) -> Callable[[], bool]:
        return lambda: set(reasons) <= set(self.ended)


@pytest.fixture
def seldom_looks(monkeypatch) -> None:
    """The guard looks at all connections once an hour: what it sees before has called it."""
    monkeypatch.setattr(guard, "_LOOK_S", 3600.0)


@pytest.fixture
def guarded(context) -> Iterator[Guarded]:
    """A guard that runs; a defect of it would be missed by nobody."""
    broken: list[Exception] = []
    made: list[Guarded] = []

    def on_ended(_: str, ended: Ended, number: int) -> None:
        made[0].ended.extend(repeat(ended.reason, number))

    guard = ConnectionGuard(
        context, on_ended=on_ended, on_short=lambda _: None, on_broken=broken.append
    )
    made.append(Guarded(guard))
    guard.start()
    yield made[0]
    guard.close()
    assert broken == []


@pytest.fixture
def raw(guarded) -> Iterator[Callable[[str], socket.socket]]:
    """Makes plain connections, and closes them."""
    with ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(socket.create_connection(address_of(endpoint)))


async def is_cut(wire: socket.socket, within_s: float = WITHIN_S) -> bool:
    """Whether the other side ends the connection."""

    def read() -> bool:
        wire.settimeout(within_s)
        try:
            while wire.recv(4096):
                pass
        except ConnectionError:
            pass
        return True

    return await anyio.to_thread.run_sync(read)


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_peer_that_asks_for_many_times_the_bound_is_not_ended(
    context, running, guarded, has_keys
):
    """Nor for what ZeroMQ itself adds to each message, which is more than the bound in the end.

    The bound has room for what is sent again to a server that is slow for a moment.
    """
    keys, theirs = new_key_pair(), new_key_pair()
    server_curve = ServerCurve(keys, "peer") if has_keys else None
    client_curve = ClientCurve(theirs, keys.public) if has_keys else None

    async def admit(_: object) -> bool:
        return True

    check = KeyCheck(context, admit)
    server = serve(
        context,
        "tcp://127.0.0.1:*",
        options=SocketOptions(curve=server_curve),
        watch=guarded.watch(unread_bytes=16 * KIB, unsent_bytes=16 * KIB),
    )
    client = RequestClient(
        context, server.endpoint, boot="client", options=SocketOptions(curve=client_curve)
    )

    async with running(check, server, client):
        for number in range(3000):
            reply = await client.ask(Ask(number=number, fill=bytes(KIB)), timeout_s=WITHIN_S)
            assert reply.number == number

    assert guarded.ended == []


async def test_a_message_larger_than_what_may_wait_is_cut_and_the_others_are_answered(
    context, running, guarded
):
    server = serve(context, "tcp://127.0.0.1:*", watch=guarded.watch(unread_bytes=256 * KIB))
    client = RequestClient(context, server.endpoint, boot="client")
    endless = frame(bytes(KIB), flags=1) * 100

    async with running(server, client):
        wire = await anyio.to_thread.run_sync(connected, server.endpoint, "DEALER")
        await anyio.to_thread.run_sync(
            lambda: send_until_cut(wire, repeat(endless), most_bytes=100 << 20)
        )
        await until(guarded.has_ended(EndReason.UNREAD))
        reply = await client.ask(Ask(number=3), timeout_s=WITHIN_S)

    assert reply.number == 3


async def test_what_comes_is_counted_though_zeromq_reads_it_at_once(
    context, running, seldom_looks, guarded
):
    """The last bytes pass the bound, and nothing follows that could call the guard again."""
    server = serve(context, "tcp://127.0.0.1:*", watch=guarded.watch(unread_bytes=64 * KIB))
    client = RequestClient(context, server.endpoint, boot="client")
    piece = frame(bytes(KIB), flags=1) * 8

    async with running(server, client):
        wire = await anyio.to_thread.run_sync(connected, server.endpoint, "DEALER")
        with wire:
            for number in range(8):
                wire.sendall(piece)
                await client.ask(Ask(number=number), timeout_s=WITHIN_S)
            await until(guarded.has_ended(EndReason.UNREAD))


async def test_who_takes_no_replies_is_cut(context, running, guarded):
    server = serve(
        context,
        "tcp://127.0.0.1:*",
        lambda _, call: call.reply(Echoed(fill=bytes(64 * KIB))),
        watch=guarded.watch(unsent_bytes=256 * KIB),
    )
    asked = {**PING, "op": "ask"}

    async with running(server):
        wire = await anyio.to_thread.run_sync(connected, server.endpoint, "DEALER")
        with wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KIB)
            pieces = (frame(msgpack.packb({**asked, "id": number})) for number in range(1, 500))
            await anyio.to_thread.run_sync(wire.sendall, b"".join(pieces))
            await until(guarded.has_ended(EndReason.UNSENT))

    assert EndReason.UNREAD not in guarded.ended


async def test_a_connection_too_many_of_an_address_is_ended(context, running, guarded, raw):
    watch = guarded.watch(connections_by_address=2)
    server = serve(context, "tcp://127.0.0.1:*", watch=watch)

    async with running(server):
        wires = [raw(server.endpoint) for _ in range(3)]
        await until(guarded.has_ended(EndReason.TOO_MANY_OF_ADDRESS))

        assert await is_cut(wires[2])
    assert guarded.guard.num_ended.total() == 1


async def test_connections_too_soon_after_each_other_are_ended(context, running, guarded, raw):
    server = serve(context, "tcp://127.0.0.1:*", watch=guarded.watch(new_by_address_s=2))

    async with running(server):
        for _ in range(6):
            raw(server.endpoint)
        await until(guarded.has_ended(EndReason.TOO_FAST))


async def test_connections_that_say_nothing_make_room_for_one_that_does(
    context, running, guarded, raw, monkeypatch
):
    monkeypatch.setattr(door, "SILENT_S", 0.0)
    server = serve(context, "tcp://127.0.0.1:*", watch=guarded.watch(connections=3))
    client = RequestClient(context, server.endpoint, boot="client")

    async with running(server, client):
        await client.ask(Ask(), timeout_s=WITHIN_S)
        for _ in range(5):
            raw(server.endpoint)
        await until(guarded.has_ended(EndReason.SILENT))
        late = RequestClient(context, server.endpoint, boot="late")
        async with running(late):
            await late.ask(Ask(), timeout_s=WITHIN_S)
        reply = await client.ask(Ask(number=5), timeout_s=WITHIN_S)

    assert reply.number == 5
    assert set(guarded.ended) == {EndReason.SILENT}


async def test_a_publisher_that_has_hung_up_is_watched_still(context, running, guarded):
    publisher = EventPublisher(
        context, "tcp://127.0.0.1:*", boot="p", watch=guarded.watch(messages=10)
    )
    topics = b"".join(frame(b"\x01" + str(number).encode()) for number in range(20))

    async def subscribe_too_often() -> None:
        """Again and again: a socket that closes, and one that sent us away, let us in at first.

        So does one whose guard is late: what came before it saw the connection is not counted.
        """
        while EndReason.TOO_MANY_MESSAGES not in guarded.ended:
            wire = await anyio.to_thread.run_sync(connected, publisher.endpoint, "SUB")
            with wire, suppress(OSError):
                wire.sendall(topics)
                await is_cut(wire, within_s=2.0)

    async with running(publisher):
        for _ in range(2):
            guarded.ended.clear()
            with anyio.fail_after(2 * WITHIN_S):
                await subscribe_too_often()
            publisher.hang_up()

    # Once in each round; once more when the next connection came before the news of an end.
    assert guarded.guard.num_ended[EndReason.TOO_MANY_MESSAGES] >= 2


@pytest.mark.parametrize(
    ("host", "counted_as"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_host_is_counted_by_its_network(host, counted_as):
    assert counted_by(host) == counted_as


async def test_what_waits_ends_with_its_connection_and_is_done_again_for_who_comes_back(
    context, running, guarded, hold
):
    server = serve(context, "tcp://127.0.0.1:*", hold, watch=guarded.watch())
    client = RequestClient(context, server.endpoint, boot="client")
    asked = frame(msgpack.packb(PING | {"op": "ask", "boot": "waits"}))
    ended: list[Call] = []

    async def comes() -> socket.socket:
        wire = await anyio.to_thread.run_sync(connected, server.endpoint, "DEALER")
        wire.sendall(asked)
        call = await hold.arrived.get()
        call.on_end = lambda: ended.append(call)
        return wire

    async with running(server, client):
        (await comes()).close()
        while not ended:  # the server looks when it is asked something
            await client.ask(Ping(), timeout_s=WITHIN_S)
        with await comes():
            await client.ask(Ping(), timeout_s=WITHIN_S)
            num_waiting, num_ended = server.num_pending, len(ended)

    assert ended[0] is hold.calls[0]
    assert (num_waiting, num_ended) == (1, 1)


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
