"""Where a socket connects: names are resolved beside the event loop, and only what is allowed."""

import asyncio
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.bus import AllowedPeers, RequestClient, SocketOptions
from kvbus.errors import ConfigError, ErrorCode, KVBusError, LocalError, RemoteError
from tests.agents import until
from tests.bus.conftest import TCP, Bus, Record
from tests.bus.messages import Ask, Echoed

pytestmark = pytest.mark.anyio

WITHIN_S = 20.0
MAX_LOOKUPS = 32


class NameServer:
    """Stands for the machine's: knows ``known``, and answers about ``silent`` when released."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released, self.knows_all = threading.Event(), False
        self.mark = uuid.uuid4().hex  # the process keeps what it has found

    def name(self, text: str) -> str:
        return f"{text}.{self.mark}"

    def getaddrinfo(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host.partition(".")[0])
        if host.startswith("silent"):
            assert self.released.wait(WITHIN_S)
        elif host.startswith("unknown") and not self.knows_all:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    """What stands for this machine's name server; its threads end with the test."""
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.released.set()


async def asked(bus: Bus, *endpoints: str) -> list[Echoed | KVBusError]:
    """What a client of each endpoint is answered, or told."""
    clients = [bus.client(at=endpoint) for endpoint in endpoints]
    return await asked_by(bus, *clients)


async def asked_by(bus: Bus, *clients: RequestClient) -> list[Echoed | KVBusError]:
    outcomes: list[Echoed | KVBusError] = []
    async with bus.running(*clients):
        for client in clients:
            client.send(Ask(number=7), timeout_s=WITHIN_S, on_reply=outcomes.append)
        await until(lambda: len(outcomes) == len(clients))
    return outcomes


async def test_a_name_is_looked_up_once_for_all_who_want_it_and_kept_for_a_while(
    bus: Bus, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = bus.server(at=TCP)
    port = server.endpoint.rpartition(":")[2]
    wanted = f"tcp://{names.name('silent')}:{port}"
    asyncio.get_running_loop().call_later(0.05, names.released.set)

    async with bus.running(server):
        together = await asked(bus, *[wanted] * 5)
        again = await asked(bus, wanted)
        num_kept = len(names.asked)
        monkeypatch.setattr("kvbus.bus.names.KEEP_S", 0.0)
        monkeypatch.setattr("kvbus.bus.names.MAX_KEPT", 2)
        for number in (1, 1, 2, 3):
            await asked(bus, f"tcp://{names.name(f'other{number}')}:{port}")
        await asked(bus, wanted)

    assert together + again == [Echoed(number=7)] * 6
    assert num_kept == 1
    assert names.asked == ["silent", "other1", "other1", "other2", "other3", "silent"]


async def test_lookups_are_bounded_and_one_that_is_not_answered_holds_up_nobody(
    bus: Bus, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.bus.names.ANSWER_WITHIN_S", 0.5)
    server = bus.server(at=TCP)
    lost = [
        bus.client(at=f"tcp://{names.name(f'silent{number}')}:7701")
        for number in range(MAX_LOOKUPS + 1)
    ]

    async with bus.running(server):
        waiting = asyncio.ensure_future(asked_by(bus, *lost))
        await until(lambda: len(names.asked) == MAX_LOOKUPS)
        replies = [await asked(bus, server.endpoint) for _ in range(5)]
        failures = [error for error in await waiting if isinstance(error, RemoteError)]

    assert replies == [[Echoed(number=7)]] * 5
    told = sorted(error.message.rpartition(": ")[2] for error in failures)
    assert told == ["32 other names are being looked up"] + ["no answer within 0.5 s"] * 32
    assert {error.code for error in failures} == {ErrorCode.PEER_UNREACHABLE}


async def test_a_name_that_is_not_known_is_told_at_once_and_tried_again(
    bus: Bus, names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.bus.names.RETRY_S", 0.05)
    server = bus.server(at=TCP)
    port = server.endpoint.rpartition(":")[2]
    client = bus.client(at=f"tcp://{names.name('unknown')}:{port}")

    async with bus.running(server, client):
        with pytest.raises(RemoteError, match=r"unknown.*Name or service not known"):
            await client.ask(Ask(), timeout_s=WITHIN_S)
        names.knows_all = True
        reply = await client.ask(Ask(number=3), timeout_s=WITHIN_S)

    assert reply == Echoed(number=3)
    assert names.asked.count("unknown") >= 2


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
async def test_what_is_no_host_name_is_told_as_unreachable(bus: Bus, host: str) -> None:
    (failure,) = await asked(bus, f"tcp://{host}:7701")

    assert isinstance(failure, RemoteError)
    assert failure.code is ErrorCode.PEER_UNREACHABLE


async def test_requests_and_events_reach_a_host_by_its_name(bus: Bus, record: Record) -> None:
    server, publisher = bus.server(at=TCP), bus.publisher(at=TCP)
    heard = publisher.endpoint.replace("127.0.0.1", "localhost")

    async with bus.running(server, publisher, bus.subscriber(record, heard)):
        replies = await asked(bus, server.endpoint.replace("127.0.0.1", "localhost"))
        told = await record.next()

    assert replies == [Echoed(number=7)]
    assert told == ("boot", heard, "source")


@pytest.mark.parametrize("endpoint", ["tcp://host", "tcp://:7701", "tcp://host:0", "tcp://host:x"])
def test_an_endpoint_with_a_name_and_no_port_is_refused(bus: Bus, endpoint: str) -> None:
    with pytest.raises(ConfigError):
        bus.client(at=endpoint)


ALLOWED = [
    ("10.0.0.7", "tcp://10.0.0.7:1", True),
    ("10.0.0.7", "tcp://10.0.0.8:1", False),
    ("10.1.0.0/16", "tcp://10.1.255.255:65535", True),
    ("10.1.0.0/16", "tcp://10.2.0.0:1", False),
    ("10.1.2.3/16", "tcp://10.1.0.1:1", True),
    ("10.0.0.7:7501", "tcp://10.0.0.7:7501", True),
    ("10.0.0.7:7501", "tcp://10.0.0.7:7502", False),
    ("10.0.0.0/8:7000-7999", "tcp://10.9.9.9:7999", True),
    ("10.0.0.0/8:7000-7999", "tcp://10.9.9.9:8000", False),
    ("fd00::/8", "tcp://[fd00::1]:7501", True),
    ("[fd00::/8]:7501", "tcp://[fd12::1]:7501", True),
    ("[fd00::/8]:7501", "tcp://[fd12::1]:7502", False),
    ("fd00::/8", "tcp://10.0.0.7:1", False),
    ("10.0.0.7", "tcp://[::ffff:10.0.0.7]:1", True),
    ("::/0", "tcp://[::ffff:10.0.0.7]:1", False),
    ("fe80::/10", "tcp://[fe80::1%lo]:1", True),
]


@pytest.mark.parametrize(("entry", "endpoint", "allowed"), ALLOWED)
def test_an_address_is_allowed_by_its_network_and_port(
    entry: str, endpoint: str, allowed: bool
) -> None:
    for entries in ([entry], ["192.0.2.1", entry]):
        try:
            AllowedPeers(entries).check(endpoint)
        except LocalError:
            assert not allowed
        else:
            assert allowed


@pytest.mark.parametrize(
    "entry",
    ["", "host", "host:1", "10.0.0.0/33", "10.0.0.1:x", "10.0.0.1:1-", "[fd00::1]:x", "::1]"],
)
def test_an_entry_that_is_none_is_refused_by_its_key(entry: str) -> None:
    with pytest.raises(ConfigError, match="'allowed_peers'") as refused:
        AllowedPeers([entry])

    assert refused.value.detail == {"key": "allowed_peers"}


def test_a_number_that_is_not_allowed_is_not_connected_to(bus: Bus) -> None:
    options = SocketOptions(allowed=AllowedPeers(["10.0.0.0/8"]))

    with pytest.raises(LocalError, match=r"127\.0\.0\.1:1 is not in 'allowed_peers'"):
        bus.client(at="tcp://127.0.0.1:1", options=options)


@pytest.mark.parametrize(("entry", "allowed"), [("127.0.0.1", True), ("127.0.0.2", False)])
async def test_a_name_is_looked_at_by_the_number_that_it_leads_to(
    bus: Bus, names: NameServer, entry: str, allowed: bool
) -> None:
    server, options = bus.server(at=TCP), SocketOptions(allowed=AllowedPeers([entry]))
    endpoint = server.endpoint.replace("127.0.0.1", names.name("agent"))

    async with bus.running(server):
        (outcome,) = await asked_by(bus, bus.client(at=endpoint, options=options))

    code = outcome.code if isinstance(outcome, KVBusError) else None
    assert code == (None if allowed else ErrorCode.FORBIDDEN)
