"""Names are resolved beside the event loop, and outside of ZeroMQ."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvbus.bus import EventListener, EventPublisher, EventSubscriber, RequestClient
from kvbus.bus import names as names_module
from kvbus.bus.names import MAX_LOOKUPS, NameCache, look_up
from kvbus.errors import ConfigError, ErrorCode, RemoteError
from tests.agents import until
from tests.bus.messages import Ask, Echoed, serve

pytestmark = pytest.mark.anyio

WITHIN_S = 20.0
UNKNOWN = OSError(socket.EAI_NONAME, "Name or service not known")


class NameServer:
    """Answers for a few hosts, with errors for others, and about ``silent`` ones when released."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()

    def look_up(self, host: str) -> str:
        self.asked.append(host)
        if host.startswith("silent"):
            assert self.released.wait(WITHIN_S)
        if host.startswith("unknown"):
            raise UNKNOWN
        return "127.0.0.1"


@pytest.fixture
def server(monkeypatch) -> Iterator[NameServer]:
    """What stands for this machine's name server; its threads end with the test."""
    server = NameServer()
    monkeypatch.setattr(names_module.NAMES, "lookup", server.look_up)
    monkeypatch.setattr(names_module.NAMES, "_kept", {})
    yield server
    server.released.set()


def ask_all(cache: NameCache, hosts: list[str]) -> tuple[list[str | OSError], Callable[[], bool]]:
    found: list[str | OSError] = []
    for host in hosts:
        cache.find(host, found.append)
    return found, lambda: len(found) == len(hosts)


async def test_one_name_is_looked_up_once_for_all_who_want_it() -> None:
    server = NameServer()
    cache = NameCache(server.look_up)

    found, done = ask_all(cache, ["silent"] * 5)
    assert found == []
    server.released.set()
    await until(done)
    again, _ = ask_all(cache, ["silent"])

    assert found == ["127.0.0.1"] * 5
    assert again == ["127.0.0.1"], "answered at once, from the cache"
    assert server.asked == ["silent"]


@pytest.mark.parametrize(("keep_s", "times"), [(60.0, 1), (0.0, 2)])
async def test_an_answer_is_kept_for_a_while(keep_s, times, monkeypatch) -> None:
    monkeypatch.setattr(names_module, "KEEP_S", keep_s)
    server = NameServer()
    cache = NameCache(server.look_up)

    for _ in range(2):
        _, done = ask_all(cache, ["known"])
        await until(done)

    assert server.asked == ["known"] * times


async def test_an_error_is_not_kept() -> None:
    server = NameServer()
    cache = NameCache(server.look_up)

    for _ in range(2):
        found, done = ask_all(cache, ["unknown"])
        await until(done)
        assert found == [UNKNOWN]

    assert server.asked == ["unknown"] * 2


async def test_lookups_and_what_is_kept_of_them_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(names_module, "MAX_KEPT", 40)
    server = NameServer()
    cache = NameCache(server.look_up)

    waiting, done = ask_all(cache, [f"silent{number}" for number in range(MAX_LOOKUPS)])
    refused, _ = ask_all(cache, ["silent"])
    server.released.set()
    await until(done)
    for number in range(41):
        _, done = ask_all(cache, [f"host{number}"])
        await until(done)

    assert waiting == ["127.0.0.1"] * MAX_LOOKUPS
    assert "32 other names" in str(refused[0])
    assert len(cache._kept) == 40


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "bad\udcffname"])
def test_what_is_no_name_is_an_os_error_or_none(host) -> None:
    found: list[str | OSError] = []
    cache = NameCache(look_up)
    cache._waiting[host] = [found.append]

    cache._look_up(host)

    assert isinstance(found[0], OSError)


async def test_requests_and_events_reach_a_host_by_its_name(context, running) -> None:
    served = serve(context, "tcp://127.0.0.1:0")
    publisher = EventPublisher(context, "tcp://127.0.0.1:0", boot="p", heartbeat_s=0.05)
    heard: list[str] = []

    class Listener(EventListener):
        def on_boot(self, endpoint: str, boot: str) -> None:
            heard.append(boot)

    client = RequestClient(context, by_name(served.endpoint), boot="client")
    subscriber = EventSubscriber(context, Listener())
    async with running(served, publisher, client, subscriber):
        subscriber.add(by_name(publisher.endpoint))
        reply = await client.ask(Ask(number=7), timeout_s=WITHIN_S)
        await until(lambda: heard == ["p"])

    assert reply == Echoed(number=7)


async def test_a_name_server_that_does_not_answer_holds_up_nobody(
    context, running, server, monkeypatch
) -> None:
    monkeypatch.setattr(names_module, "ANSWER_WITHIN_S", 0.5)
    served = serve(context, "tcp://127.0.0.1:0")
    lost = RequestClient(context, "tcp://silent:7701", boot="lost")
    client = RequestClient(context, served.endpoint, boot="client")

    async with running(served, lost, client):
        with pytest.raises(RemoteError) as failure:
            await lost.ask(Ask(), timeout_s=WITHIN_S)
        assert server.asked == ["silent"]
        replies = [await client.ask(Ask(number=n), timeout_s=WITHIN_S) for n in range(20)]
        served_too = RequestClient(context, by_name(served.endpoint), boot="other")
        async with running(served_too):
            await served_too.ask(Ask(), timeout_s=WITHIN_S)

    assert failure.value.code is ErrorCode.PEER_UNREACHABLE
    assert failure.value.message == (
        "cannot resolve the host of tcp://silent:7701: no answer within 0.5 s"
    )
    assert replies == [Echoed(number=n) for n in range(20)]


async def test_a_name_that_is_not_known_is_told_at_once_and_tried_again(
    context, running, server, monkeypatch
) -> None:
    monkeypatch.setattr(names_module, "RETRY_S", 0.05)
    served = serve(context, "tcp://127.0.0.1:0")
    endpoint = by_name(served.endpoint).replace("localhost", "unknown")
    client = RequestClient(context, endpoint, boot="client")

    async with running(served, client):
        with pytest.raises(RemoteError, match=r"unknown.*Name or service not known"):
            await client.ask(Ask(), timeout_s=WITHIN_S)
        monkeypatch.setattr(names_module.NAMES, "lookup", lambda _: "127.0.0.1")
        reply = await client.ask(Ask(number=3), timeout_s=WITHIN_S)

    assert reply == Echoed(number=3)


@pytest.mark.parametrize("endpoint", ["tcp://host", "tcp://:7701", "tcp://host:0", "tcp://host:x"])
def test_an_endpoint_with_a_name_and_no_port_is_refused(context, endpoint) -> None:
    with pytest.raises(ConfigError):
        RequestClient(context, endpoint, boot="client")


def by_name(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "localhost")
