"""The HTTP port of an agent: its answers, and its health pages when the loop hangs."""

import asyncio
import base64
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from prometheus_client import CollectorRegistry

from kvbus.agent.http import AgentPages, call_loop
from kvbus.protocol import Fault
from kvbus.spawn import free_port
from tests.support.agents import AgentProcess, started

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """An agent at an IPv6 address that asks for a token."""
    path = tmp_path_factory.mktemp("token") / "token"
    path.touch(mode=0o600)
    path.write_text(f"{TOKEN}\n")
    with started("prefill", http_bind=f"[::1]:{free_port()}", http_token_file=str(path)) as agents:
        yield agents.all[0]


@contextmanager
def answered(
    agent: AgentProcess, path: str, *, method: str = "GET", **headers: str
) -> Iterator[http.client.HTTPResponse]:
    host, _, port = agent.settings["http_bind"].rpartition(":")
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        yield connection.getresponse()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


BEARER = f"Bearer {TOKEN}"
WRONG = [
    *("", TOKEN, "Bearer", "Bearer x", BEARER + "x"),
    *(basic("x"), "Basic x", "Basic /w==", "Basic ä"),
]
HERE = ["127.0.0.1:1", "127.8.8.8", "localhost:7703", "[::1]:7703"]
ELSEWHERE = ["kvbus.example", "127.0.0.1.example", "[::1].example", "lo", ""]
ASKED: list[tuple[str, str, dict[str, str], int, str]] = [
    *(("guarded", "/metrics", {"Authorization": shown}, 401, "http_token_file") for shown in WRONG),
    *(
        ("guarded", "/metrics", {"Authorization": shown}, 200, "kvbus_")
        for shown in (BEARER, f"bearer {TOKEN}", basic(TOKEN))
    ),
    ("guarded", "/healthz", {}, 200, "ok"),
    ("guarded", "/other", {}, 401, ""),
    *(("prefill", "/metrics", {"Host": host}, 200, "kvbus_") for host in HERE),
    *(("prefill", "/metrics", {"Host": host}, 403, "") for host in ELSEWHERE),
    ("prefill", "/metrics", {"method": "POST"}, 501, ""),
    ("prefill", "/metrics", {"method": "HEAD"}, 200, ""),
    ("prefill", "/other", {}, 404, "/metrics"),
    ("prefill", "/metrics", {"Long": 20_000 * "x"}, 431, ""),
]


@pytest.mark.parametrize(("agent", "path", "more", "status", "words"), ASKED)
def test_who_is_answered_with_what(  # noqa: PLR0917 - the columns of the table
    request: pytest.FixtureRequest,
    agent: str,
    path: str,
    more: dict[str, Any],
    status: int,
    words: str,
) -> None:
    with answered(request.getfixturevalue(agent), path, **more) as answer:
        assert answer.status == status
        assert words in answer.read().decode()
        asks_for_a_password = "Basic" in (answer.getheader("WWW-Authenticate") or "")
        assert asks_for_a_password == (status == 401)


@pytest.mark.parametrize("sends", [False, True], ids=["silent", "slow"])
def test_incomplete_requests_delay_others_few_seconds(prefill: AgentProcess, sends: bool) -> None:
    host, _, port = prefill.settings["http_bind"].rpartition(":")
    ended = threading.Event()
    with ExitStack() as stack:
        waiting = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)
        ]
        sender = threading.Thread(target=send_slowly, args=(waiting if sends else [], ended))
        sender.start()
        stack.callback(sender.join)
        stack.callback(ended.set)
        for _ in range(3):
            with answered(prefill, "/healthz") as answer:
                assert answer.status == 200
        with suppress(ConnectionResetError):
            waiting[0].settimeout(30)
            assert waiting[0].recv(1) == b"", "it is closed though its request goes on"


def send_slowly(connections: list[socket.socket], ended: threading.Event) -> None:
    text = b"GET /healthz HTTP/1.1\r\nX: "
    while not ended.wait(0.2):
        for one in connections:
            with suppress(OSError):  # it was closed
                one.sendall(text)
        text = b"x"


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def pages(loop: asyncio.AbstractEventLoop, *faults: Fault) -> AgentPages:
    report: Any = SimpleNamespace(unready=lambda: list(faults))
    return AgentPages(loop, CollectorRegistry(), report)


def verdict(pages: AgentPages, path: str) -> tuple[str, str]:
    answer = pages.answer(path, {})
    return str(answer.status.value), answer.body.decode()


GOOD = ("200", "ok\n")


def test_hung_loop_is_not_alive_and_faults_are_unready(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [Fault("no engine", ""), Fault("draining", "")]
    health, faulty = pages(loop), pages(loop, *faults)
    goes_on, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(60)

    assert verdict(health, "/healthz") == verdict(health, "/readyz") == GOOD
    call_loop(loop, lambda: asyncio.get_running_loop().call_soon(hang))
    hangs.wait()
    with monkeypatch.context() as patch:
        patch.setattr("kvbus.agent.http.ANSWERS_WITHIN_S", 0.2)
        alive, ready = verdict(health, "/healthz"), verdict(health, "/readyz")
    goes_on.set()
    assert (alive[0], ready[0]) == ("503", "503")
    assert "event loop" in alive[1]
    assert verdict(health, "/healthz") == GOOD
    assert verdict(faulty, "/healthz") == GOOD
    assert verdict(faulty, "/readyz") == ("503", "no engine\ndraining\n")


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
def test_error_of_call_is_raised(loop: asyncio.AbstractEventLoop, error: type[Exception]) -> None:
    def fails() -> NoReturn:
        raise error("its own")

    with pytest.raises(error, match="its own"):
        call_loop(loop, fails)
