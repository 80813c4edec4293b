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
    BusContext,
    Call,
    ClientCurve,
    ConnectionGuard,
    DoorLimits,
    Ended,
    EndReason,
    KeyCheck,
    ServerCurve,
    SocketOptions,
    new_key_pair,
)
from kvbus.bus.accepted import counted_by, is_of_same_user
from kvbus.protocol import Ping
from tests.agents import WITHIN_S, until
from tests.bus.conftest import TCP, Bus, Hold
from tests.bus.messages import Ask, Echoed, asked
from tests.security.wire import address_of, connected, frame, send_until_cut

pytestmark = pytest.mark.anyio
KIB = 1024


@dataclass
class Guarded:
    """A guard that runs, and what it has ended."""

    guard: ConnectionGuard
    ended: list[EndReason] = field(default_factory=list)

    def watch(self, **limits: Any) -> Callable[..., Any]:
        return lambda one: self.guard.watch(one, "tested", DoorLimits(**limits))

    async def ends(self, reason: EndReason) -> None:
        await until(lambda: reason in self.ended)


@pytest.fixture
def guarded(context: BusContext) -> Iterator[Guarded]:
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
def raw() -> Iterator[Callable[[str], socket.socket]]:
    """Makes plain connections, and closes them."""
    with ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(socket.create_connection(address_of(endpoint)))


async def dealer(endpoint: str, kind: str = "DEALER") -> socket.socket:
    return await anyio.to_thread.run_sync(connected, endpoint, kind)


async def is_cut(wire: socket.socket, within_s: float = WITHIN_S) -> bool:
    """Whether the other side ends the connection."""

    def read() -> bool:
        wire.settimeout(within_s)
        with suppress(ConnectionError):
            while wire.recv(4096):
                pass
        return True

    return await anyio.to_thread.run_sync(read)


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_peer_that_asks_for_many_times_the_bound_is_not_ended(
    bus: Bus, guarded: Guarded, has_keys: bool
) -> None:
    """Nor for what ZeroMQ itself adds to each message, which is more than the bound in the end.

    The bound has room for what is sent again to a server that is slow for a moment.
    """
    keys, theirs = new_key_pair(), new_key_pair()
    server_curve = ServerCurve(keys, "peer") if has_keys else None
    client_curve = ClientCurve(theirs, keys.public) if has_keys else None

    async def admit(_: object) -> bool:
        return True

    check = KeyCheck(bus.context, admit)
    server = bus.server(
        at=TCP,
        options=SocketOptions(curve=server_curve),
        watch=guarded.watch(unread_bytes=16 * KIB, unsent_bytes=16 * KIB),
    )
    client = bus.client(at=server.endpoint, options=SocketOptions(curve=client_curve))

    async with bus.running(check, server, client):
        for number in range(3000):
            reply = await client.ask(Ask(number=number, fill=bytes(KIB)), timeout_s=WITHIN_S)
            assert reply.number == number

    assert guarded.ended == []


async def test_a_message_larger_than_what_may_wait_is_cut_and_the_others_are_answered(
    bus: Bus, guarded: Guarded
) -> None:
    watch = guarded.watch(unread_bytes=256 * KIB)
    endless = frame(bytes(KIB), flags=1) * 100

    async with bus.pair(server={"at": TCP, "watch": watch}) as (server, client):
        wire = await dealer(server.endpoint)
        await anyio.to_thread.run_sync(
            lambda: send_until_cut(wire, repeat(endless), most_bytes=100 << 20)
        )
        await guarded.ends(EndReason.UNREAD)
        reply = await client.ask(Ask(number=3), timeout_s=WITHIN_S)

    assert reply.number == 3


async def test_what_comes_is_counted_though_zeromq_reads_it_at_once(
    bus: Bus, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes pass the bound, and nothing follows that could call the guard again."""
    monkeypatch.setattr("kvbus.bus.guard._LOOK_S", 3600.0)
    watch = guarded.watch(unread_bytes=64 * KIB)
    piece = frame(bytes(KIB), flags=1) * 8

    async with bus.pair(server={"at": TCP, "watch": watch}) as (server, client):
        with await dealer(server.endpoint) as wire:
            for number in range(8):
                wire.sendall(piece)
                await client.ask(Ask(number=number), timeout_s=WITHIN_S)
            await guarded.ends(EndReason.UNREAD)


async def test_who_takes_no_replies_is_cut(bus: Bus, guarded: Guarded) -> None:
    watch = guarded.watch(unsent_bytes=256 * KIB)
    server = bus.server(
        lambda _, call: call.reply(Echoed(fill=bytes(64 * KIB))), at=TCP, watch=watch
    )
    pieces = b"".join(frame(msgpack.packb(asked(number))) for number in range(1, 500))

    async with bus.running(server):
        with await dealer(server.endpoint) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KIB)
            await anyio.to_thread.run_sync(wire.sendall, pieces)
            await guarded.ends(EndReason.UNSENT)

    assert EndReason.UNREAD not in guarded.ended


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"connections_by_address": 2}, EndReason.TOO_MANY_OF_ADDRESS),
        ({"new_by_address_s": 2}, EndReason.TOO_FAST),
    ],
)
async def test_connections_too_many_or_too_fast_of_an_address_are_ended(
    bus: Bus,
    guarded: Guarded,
    raw: Callable[[str], socket.socket],
    limits: dict[str, int],
    reason: EndReason,
) -> None:
    server = bus.server(at=TCP, watch=guarded.watch(**limits))

    async with bus.running(server):
        wires = [raw(server.endpoint) for _ in range(6)]
        await guarded.ends(reason)

        assert await is_cut(wires[-1])
    assert set(guarded.ended) == {reason}


async def test_connections_that_say_nothing_make_room_for_one_that_does(
    bus: Bus,
    guarded: Guarded,
    raw: Callable[[str], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.bus.door.SILENT_S", 0.0)
    watch = guarded.watch(connections=3)

    async with bus.pair(server={"at": TCP, "watch": watch}) as (server, client):
        await client.ask(Ask(), timeout_s=WITHIN_S)
        for _ in range(5):
            raw(server.endpoint)
        await guarded.ends(EndReason.SILENT)
        late = bus.client("late", server.endpoint)
        async with bus.running(late):
            await late.ask(Ask(), timeout_s=WITHIN_S)
        reply = await client.ask(Ask(number=5), timeout_s=WITHIN_S)

    assert reply.number == 5
    assert set(guarded.ended) == {EndReason.SILENT}


async def test_a_publisher_that_has_hung_up_is_watched_still(bus: Bus, guarded: Guarded) -> None:
    publisher = bus.publisher(at=TCP, heartbeat_s=1.0, watch=guarded.watch(messages=10))
    topics = b"".join(frame(b"\x01" + str(number).encode()) for number in range(20))

    async def subscribe_too_often() -> None:
        """Again and again: a socket that closes, and one that sent us away, let us in at first.

        So does one whose guard is late: what came before it saw the connection is not counted.
        """
        while EndReason.TOO_MANY_MESSAGES not in guarded.ended:
            with await dealer(publisher.endpoint, "SUB") as wire, suppress(OSError):
                wire.sendall(topics)
                await is_cut(wire, within_s=2.0)

    async with bus.running(publisher):
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
def test_an_ipv6_host_is_counted_by_its_network(host: str, counted_as: str) -> None:
    assert counted_by(host) == counted_as


async def test_what_waits_ends_with_its_connection_and_is_done_again_for_who_comes_back(
    bus: Bus, guarded: Guarded, hold: Hold
) -> None:
    ended: list[Call] = []

    async with bus.pair(hold, server={"at": TCP, "watch": guarded.watch()}) as (server, client):

        async def comes() -> socket.socket:
            wire = await dealer(server.endpoint)
            wire.sendall(frame(msgpack.packb(asked(1, "waits"))))
            call = await hold.arrived.get()
            call.on_end = lambda: ended.append(call)
            await until(lambda: guarded.guard.num_connections == 2)  # the guard has seen it, too
            return wire

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
