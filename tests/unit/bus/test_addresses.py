"""Where a socket connects: names are resolved beside the event loop, and only what is allowed."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvbus.bus import AllowedPeers, SocketOptions
from kvbus.errors import ConfigError, ErrorCode, KVBusError, LocalError, RemoteError
from tests.support.agents import until
from tests.unit.bus.conftest import TCP, Bus, Record
from tests.unit.bus.messages import Ask, Echoed

pytestmark = pytest.mark.anyio

WITHIN_S = 20.0
MAX_LOOKUPS = 32


class NameServer:
    """Stands for the machine's: knows ``known``, and answers about ``silent`` when released."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released, self.knows_all = threading.Event(), False
        self.address = "127.0.0.1"

    def name(self, text: str) -> str:
        return f"{text}.test"

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host.partition(".")[0])
        if host.startswith("silent"):
            assert self.released.wait(WITHIN_S)
        elif host.startswith("unknown") and not self.knows_all:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, 0))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    """What stands for this machine's name server; its threads end with the test."""
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.released.set()


async def asked(bus: Bus, *endpoints: str, **options: Any) -> list[Echoed | KVBusError]:
    """What a client of each endpoint is answered, or told."""
    clients = [bus.client(at=endpoint, **options) for endpoint in endpoints]
    outcomes: list[Echoed | KVBusError] = []
    async with bus.running(*clients):
        for client in clients:
            client.send(Ask(number=7), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await until(lambda: len(outcomes) == len(clients))
    return outcomes


async def test_moved_name_is_looked_up_by_next_client_not_current_one(
    bus: Bus, names: NameServer
) -> None:
    server = bus.server(at=TCP)
    client = bus.client(at=server.endpoint.replace("127.0.0.1", names.name("moves")))
    nowhere = server.endpoint.replace("127.0.0.1", names.name("moves"))

    async with bus.running(server, client):
        first = await client.ask(Ask(number=7), timeout_s=WITHIN_S)
        names.address = "127.0.0.2"
        again = await client.ask(Ask(number=8), timeout_s=WITHIN_S)
        options = SocketOptions(allowed=AllowedPeers(["127.0.0.1"]))
        (moved,) = await asked(bus, nowhere, options=options)
        names.address = "127.0.0.1"
        (back,) = await asked(bus, nowhere, options=options)
        with pytest.raises(LocalError, match="is not in 'allowed_peers'"):
            bus.client(at="tcp://127.0.0.2:7701", options=options)

    assert back == Echoed(number=7)
    assert (first, again) == (Echoed(number=7), Echoed(number=8))
    assert getattr(moved, "code", None) is ErrorCode.FORBIDDEN
    assert names.asked == ["moves"] * 3


def moved(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "127.0.0.2")


async def test_client_and_subscriber_follow_name_to_next_address(
    bus: Bus, names: NameServer, record: Record
) -> None:
    server, publisher = bus.server(at=TCP), bus.publisher(at=TCP)
    there, heard = (
        one.endpoint.replace("127.0.0.1", names.name("moves")) for one in (server, publisher)
    )
    addresses: list[str] = []
    client = bus.client(at=there, on_moved=addresses.append)
    others = SocketOptions(allowed=AllowedPeers(["127.0.0.1"]))
    kept = bus.client("kept", at=there, options=others)

    async with bus.running(client, kept, bus.subscriber(record, heard)):
        async with bus.running(server, publisher):
            await client.ask(Ask(), timeout_s=WITHIN_S)
            await record.until("boot")
        names.address = "127.0.0.2"
        next_server = bus.server(at=moved(server.endpoint), boot="next")
        next_publisher = bus.publisher("next", at=moved(publisher.endpoint))
        async with bus.running(next_server, next_publisher):
            await until(lambda: client.peer_boot == "next")
            reply = await client.ask(Ask(number=7), timeout_s=WITHIN_S)
            told = await record.told.get()
            with pytest.raises(LocalError, match="is not in 'allowed_peers'"):
                await kept.ask(Ask(), timeout_s=WITHIN_S)

    assert reply == Echoed(number=7)
    assert told == ("boot", heard, "next")
    assert addresses == [moved(server.endpoint)]


async def test_request_at_silent_address_is_sent_to_next_address(
    bus: Bus, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing refuses: the connection is there, and packets are dropped."""
    monkeypatch.setattr("kvbus.bus.connection.MAX_NAME_PERIOD_S", 0.2)
    silent = bus.raw(zmq.ROUTER, TCP)
    endpoint = silent.socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    client = bus.client(at=endpoint.replace("127.0.0.1", names.name("moves")))
    outcomes: list[Echoed | KVBusError] = []

    async with bus.running(client, bus.server(at=moved(endpoint))):
        client.send(Ask(number=7), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await silent.asked()
        names.address = "127.0.0.2"
        await until(lambda: outcomes)

    assert outcomes == [Echoed(number=7)]


async def test_client_is_told_whether_its_name_has_new_address(bus: Bus, names: NameServer) -> None:
    """The earlier address may be another server's, which answers."""
    server = bus.server(at=TCP)
    client = bus.client(at=server.endpoint.replace("127.0.0.1", names.name("moves")))
    next_server = bus.server(at=moved(server.endpoint), boot="next")

    async with bus.running(server, next_server, client):
        await client.ask(Ask(), timeout_s=WITHIN_S)
        stayed = await client.has_moved(client.address)
        names.address = "127.0.0.2"
        has_moved = await client.has_moved(server.endpoint)
        await until(lambda: client.peer_boot == "next")

    assert (stayed, has_moved) == (False, True)


async def test_lookups_are_bounded_and_unanswered_one_delays_no_client(
    bus: Bus, names: NameServer
) -> None:
    server, outcomes = bus.server(at=TCP), list[Echoed | KVBusError]()
    lost = [bus.client(at=f"tcp://{names.name(f'silent{n}')}:7701") for n in range(MAX_LOOKUPS + 1)]

    async with bus.running(server, *lost):
        for client in lost:
            client.send(Ask(), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await until(lambda: outcomes)
        replies = [await asked(bus, server.endpoint) for _ in range(5)]
        too_many = outcomes[0]

    assert len(names.asked) == MAX_LOOKUPS
    assert replies == [[Echoed(number=7)]] * 5
    assert isinstance(too_many, RemoteError)
    assert "32 other names are being looked up" in too_many.message


async def test_unknown_name_is_reported_at_once_and_tried_again(
    bus: Bus, names: NameServer
) -> None:
    server = bus.server(at=TCP)
    client = bus.client(at=server.endpoint.replace("127.0.0.1", names.name("unknown")))

    async with bus.running(server, client):
        with pytest.raises(RemoteError, match=r"unknown.*Name or service not known") as refused:
            await client.ask(Ask(), timeout_s=WITHIN_S)
        names.knows_all = True
        reply = await client.ask(Ask(number=3), timeout_s=WITHIN_S)

    assert refused.value.code is ErrorCode.PEER_UNREACHABLE
    assert reply == Echoed(number=3)
    assert names.asked.count("unknown") >= 2


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
async def test_what_is_no_host_name_is_told_as_unreachable(bus: Bus, host: str) -> None:
    (failure,) = await asked(bus, f"tcp://{host}:7701")

    assert getattr(failure, "code", None) is ErrorCode.PEER_UNREACHABLE


async def test_requests_and_events_reach_a_host_by_its_name(bus: Bus, record: Record) -> None:
    server, publisher = bus.server(at=TCP), bus.publisher(at=TCP)
    heard = publisher.endpoint.replace("127.0.0.1", "localhost")

    async with bus.running(server, publisher, bus.subscriber(record, heard)):
        replies = await asked(bus, server.endpoint.replace("127.0.0.1", "localhost"))
        told = await record.told.get()

    assert replies == [Echoed(number=7)]
    assert told == ("boot", heard, "source")


def test_ipv6_address_without_brackets_is_refused_showing_them(bus: Bus) -> None:
    with pytest.raises(ConfigError, match=r"needs brackets: tcp://\[fd00::1\]:7701"):
        bus.client(at="tcp://fd00::1:7701")


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://host", "tcp://:7701", "tcp://host:0", "tcp://host:x", "127.0.0.1:7701", "host:7701"],
)
def test_endpoint_without_port_or_tcp_is_refused_with_its_form(bus: Bus, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="it is not tcp://HOST:PORT"):
        bus.client(at=endpoint)


ALLOWED: dict[str, tuple[list[str], list[str]]] = {
    "10.0.0.7": (["10.0.0.7:1", "[::ffff:10.0.0.7]:1"], ["10.0.0.8:1"]),
    "10.1.0.0/16": (["10.1.255.255:65535"], ["10.2.0.0:1"]),
    "10.1.2.3/16": (["10.1.0.1:1"], []),
    "10.0.0.7:7501": (["10.0.0.7:7501"], ["10.0.0.7:7502"]),
    "10.0.0.0/8:7000-7999": (["10.9.9.9:7999"], ["10.9.9.9:8000"]),
    "fd00::/8": (["[fd00::1]:7501"], ["10.0.0.7:1"]),
    "[fd00::/8]:7501": (["[fd12::1]:7501"], ["[fd12::1]:7502"]),
    "::/0": ([], ["[::ffff:10.0.0.7]:1"]),
    "fe80::/10": (["[fe80::1%lo]:1"], []),
}
"""By entry: what it allows, and what it does not."""


@pytest.mark.parametrize("entry", ALLOWED)
def test_an_address_is_allowed_by_its_network_and_port(entry: str) -> None:
    allowed, others = ALLOWED[entry]
    for entries in ([entry], ["192.0.2.1", entry]):
        peers = AllowedPeers(entries)
        for address in allowed:
            peers.check(f"tcp://{address}")
        for address in others:
            with pytest.raises(LocalError, match="is not in 'allowed_peers'"):
                peers.check(f"tcp://{address}")


@pytest.mark.parametrize(
    "entry",
    ["", "host", "host:1", "10.0.0.0/33", "10.0.0.1:x", "10.0.0.1:1-", "[fd00::1]:x", "::1]"],
)
def test_an_entry_that_is_none_is_refused_by_its_key(entry: str) -> None:
    with pytest.raises(ConfigError, match="'allowed_peers'") as refused:
        AllowedPeers([entry])

    assert refused.value.detail == {"key": "allowed_peers"}
