"""Where a socket connects: names are resolved beside the event loop, and only if allowed."""

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
    """A name server: ``unknown`` names fail at first, ``silent`` ones wait for ``released``."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released, self.knows_all = threading.Event(), False
        self.address = "127.0.0.1"

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host.partition(".")[0])
        if host.startswith("silent"):
            assert self.released.wait(WITHIN_S)
        elif host.startswith("unknown") and not self.knows_all:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, 0))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    """The name server of this machine; its threads end with the test."""
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.released.set()


def named(endpoint: str, name: str = "moves.test") -> str:
    return endpoint.replace("127.0.0.1", name)


def moved(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "127.0.0.2")


async def asked(bus: Bus, *endpoints: str, **options: Any) -> list[Echoed | KVBusError]:
    """The outcome of a request to each endpoint."""
    clients = [bus.client(at=endpoint, **options) for endpoint in endpoints]
    outcomes: list[Echoed | KVBusError] = []
    async with bus.running(*clients):
        for client in clients:
            client.send(Ask(number=7), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await until(lambda: len(outcomes) == len(clients))
    return outcomes


HERE = SocketOptions(allowed=AllowedPeers(["127.0.0.1"]))


async def test_moved_name_is_looked_up_by_next_client_alone(bus: Bus, names: NameServer) -> None:
    server = bus.server(at=TCP)
    client = bus.client(at=named(server.endpoint))
    async with bus.running(server, client):
        first = await client.request(Ask(number=7), timeout_s=WITHIN_S)
        names.address = "127.0.0.2"
        again = await client.request(Ask(number=8), timeout_s=WITHIN_S)
        (refused,) = await asked(bus, named(server.endpoint), options=HERE)
        names.address = "127.0.0.1"
        (back,) = await asked(bus, named(server.endpoint), options=HERE)
        with pytest.raises(LocalError, match="is not in 'allowed_peers'"):
            bus.client(at="tcp://127.0.0.2:7701", options=HERE)
    assert (first, again, back) == (Echoed(number=7), Echoed(number=8), Echoed(number=7))
    assert getattr(refused, "code", None) is ErrorCode.FORBIDDEN
    assert names.asked == ["moves"] * 3


async def test_clients_and_events_follow_a_name(
    bus: Bus, names: NameServer, record: Record
) -> None:
    server, publisher = bus.server(at=TCP), bus.publisher(at=TCP)
    there, heard = named(server.endpoint), named(publisher.endpoint)
    addresses: list[str] = []
    client = bus.client(at=there, on_moved=addresses.append)
    kept = bus.client("kept", at=there, options=HERE)
    async with bus.running(client, kept, bus.subscriber(record, heard)):
        async with bus.running(server, publisher):
            await client.request(Ask(), timeout_s=WITHIN_S)
            await record.until("boot")
        names.address = "127.0.0.2"
        next_server = bus.server(at=moved(server.endpoint), boot="next")
        next_publisher = bus.publisher("next", at=moved(publisher.endpoint))
        async with bus.running(next_server, next_publisher):
            await until(lambda: client.peer_boot == "next")
            reply = await client.request(Ask(number=7), timeout_s=WITHIN_S)
            told = await record.told.get()
            with pytest.raises(LocalError, match="is not in 'allowed_peers'"):
                await kept.request(Ask(), timeout_s=WITHIN_S)
    assert reply == Echoed(number=7)
    assert told == ("boot", heard, "next")
    assert addresses == [moved(server.endpoint)]


async def test_request_at_silent_address_is_sent_to_next_address(
    bus: Bus, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is there, and packets are dropped."""
    monkeypatch.setattr("kvbus.bus.connection.MAX_NAME_PERIOD_S", 0.2)
    silent = bus.raw(zmq.ROUTER, TCP)
    client = bus.client(at=named(silent.endpoint))
    outcomes: list[Echoed | KVBusError] = []
    async with bus.running(client, bus.server(at=moved(silent.endpoint))):
        client.send(Ask(number=7), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await silent.asked()
        names.address = "127.0.0.2"
        await until(lambda: outcomes)
    assert outcomes == [Echoed(number=7)]


async def test_client_is_told_whether_its_name_has_new_address(bus: Bus, names: NameServer) -> None:
    """Another server may answer at the earlier address."""
    server = bus.server(at=TCP)
    client = bus.client(at=named(server.endpoint))
    next_server = bus.server(at=moved(server.endpoint), boot="next")
    async with bus.running(server, next_server, client):
        await client.request(Ask(), timeout_s=WITHIN_S)
        assert not await client.has_moved(client.address)
        names.address = "127.0.0.2"
        assert await client.has_moved(server.endpoint)
        await until(lambda: client.peer_boot == "next")


async def test_lookups_are_bounded_and_delay_no_client(bus: Bus, names: NameServer) -> None:
    server, outcomes = bus.server(at=TCP), list[Echoed | KVBusError]()
    lost = [bus.client(at=f"tcp://silent{n}.test:7701") for n in range(MAX_LOOKUPS + 1)]
    async with bus.running(server, *lost):
        for client in lost:
            client.send(Ask(), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await until(lambda: outcomes)
        replies = [await asked(bus, server.endpoint) for _ in range(5)]
        too_many = outcomes[0]
    assert len(names.asked) == MAX_LOOKUPS
    assert replies == [[Echoed(number=7)]] * 5
    assert isinstance(too_many, RemoteError)
    assert "32 other names are being resolved" in too_many.message


async def test_unknown_name_is_reported_and_tried_again(bus: Bus, names: NameServer) -> None:
    server = bus.server(at=TCP)
    client = bus.client(at=named(server.endpoint, "unknown.test"))
    async with bus.running(server, client):
        with pytest.raises(RemoteError, match=r"unknown.*Name or service not known") as refused:
            await client.request(Ask(), timeout_s=WITHIN_S)
        names.knows_all = True
        reply = await client.request(Ask(number=3), timeout_s=WITHIN_S)
    assert refused.value.code is ErrorCode.PEER_UNREACHABLE
    assert reply == Echoed(number=3)
    assert names.asked.count("unknown") >= 2


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
async def test_what_is_no_host_name_is_told_as_unreachable(bus: Bus, host: str) -> None:
    (failure,) = await asked(bus, f"tcp://{host}:7701")
    assert getattr(failure, "code", None) is ErrorCode.PEER_UNREACHABLE


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("tcp://fd00::1:7701", r"needs brackets: tcp://\[fd00::1\]:7701"),
        *((f"tcp://{one}", "it is not tcp://HOST:PORT") for one in ("host", ":7701", "host:0")),
        *((one, "it is not tcp://HOST:PORT") for one in ("tcp://host:x", "10.0.0.1:7701", "h:1")),
    ],
)
def test_endpoint_of_wrong_form_is_refused(bus: Bus, endpoint: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
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
