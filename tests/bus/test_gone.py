"""A server whose process is gone is told from one that is cut off, or that only came back."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from kvbus.bus import RequestClient
from kvbus.bus.listener_probe import ListenerProbe
from kvbus.bus.timers import Timers
from tests.agents import until
from tests.bus.messages import Ask, serve

pytestmark = pytest.mark.anyio

UNROUTED = "tcp://203.0.113.1:7501"
"""Of a network for documentation: nobody answers there, and nobody refuses."""


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


async def test_a_client_is_told_once_that_its_server_is_gone_and_goes_on_when_it_is_back(
    context, running
) -> None:
    gone: list[str] = []
    server = serve(context, "tcp://127.0.0.1:*", boot="first")
    endpoint = server.endpoint
    client = RequestClient(context, endpoint, boot="client", on_gone=gone.append)

    async with running(client):
        async with running(server):
            await client.ask(Ask(), timeout_s=30)
            told_early = client.is_gone
        await until(lambda: client.is_gone)
        async with running(serve(context, endpoint, boot="second")):
            await until(lambda: client.peer_boot == "second")
            still_gone = client.is_gone

    assert (told_early, still_gone) == (False, False)
    assert gone == ["first"]


async def test_a_client_whose_server_never_answered_is_told_nothing(context, running, port) -> None:
    gone: list[str] = []
    client = RequestClient(
        context, f"tcp://127.0.0.1:{port}", boot="client", on_gone=gone.append, ping_s=0.1
    )

    async with running(client):
        await until(lambda: client.counters.timeouts >= 10)

    assert gone == []


@pytest.fixture
async def timers() -> Timers:
    """Running ones."""
    made = Timers(raise_it)
    made.start(asyncio.get_running_loop())
    return made


async def test_nobody_is_gone_who_listens(timers) -> None:
    gone = threading.Event()
    probe = ListenerProbe(timers, gone.set)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe.begin(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        await until(lambda: not timers._heap)

    assert not gone.is_set()


async def test_who_refuses_is_gone_and_who_does_not_answer_is_not(timers, port) -> None:
    gone: list[str] = []
    refused = ListenerProbe(timers, lambda: gone.append("refused"))
    silent = ListenerProbe(timers, lambda: gone.append("silent"))

    silent.begin(UNROUTED)
    refused.begin(f"tcp://127.0.0.1:{port}")
    await until(lambda: gone)
    silent.end()
    refused.end()

    assert gone == ["refused"]


def raise_it(error: Exception) -> None:
    raise error
