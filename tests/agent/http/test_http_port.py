"""The HTTP port of an agent: who is answered, with what, and what it says of a loop that hangs."""

import asyncio
import base64
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from kvbus.agent import AgentConfig, AgentPages, Door, Health, HttpServer, LoopAsker, Route, as_text
from kvbus.errors import ConfigError
from kvbus.protocol import Fault

TOKEN = "a-token-of-some-length"
FAILS_WITHIN_S = 5.0


def fail(*_: object) -> NoReturn:
    raise ZeroDivisionError


ROUTES = {
    "/open": Route(lambda *_: as_text("open"), is_open=True),
    "/closed": Route(lambda query, _: as_text(query.get("word", "closed"))),
    "/failing": Route(fail),
}


@contextmanager
def served(door: Door, bind: str = "127.0.0.1:0") -> Iterator[HttpServer]:
    server = HttpServer(bind, ROUTES, door)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def guarded() -> Iterator[HttpServer]:
    """A server that asks for a token."""
    with served(Door(TOKEN)) as server:
        yield server


@pytest.fixture(scope="module")
def local() -> Iterator[HttpServer]:
    """A server without one, on loopback."""
    with served(Door(only_by_address=True)) as server:
        yield server


def ask(
    server: HttpServer, path: str, *, method: str = "GET", host: str = "127.0.0.1", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, server.port, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


BEARER = f"Bearer {TOKEN}"
WRONG = [
    "",
    TOKEN,
    "Bearer",
    "Bearer x",
    BEARER + "x",
    basic("x"),
    "Basic x",
    "Basic /w==",
    "Basic ä",
]
HERE = ["127.0.0.1:1", "127.8.8.8", "localhost:7703", "[::1]:7703"]
ELSEWHERE = ["kvbus.example", "127.0.0.1.example", "[::1].example", "lo", ""]
ASKED: list[tuple[str, str, dict[str, str], int, str]] = [
    *(("guarded", "/closed", {"Authorization": shown}, 401, "http_token_file") for shown in WRONG),
    *(
        ("guarded", "/closed?word=in", {"Authorization": shown}, 200, "in")
        for shown in (BEARER, f"bearer {TOKEN}", basic(TOKEN))
    ),
    ("guarded", "/open", {}, 200, "open"),
    ("guarded", "/other", {}, 401, ""),
    *(("local", "/closed", {"Host": host}, 200, "closed") for host in HERE),
    *(("local", "/closed", {"Host": host}, 403, "") for host in ELSEWHERE),
    ("local", "/closed", {"method": "POST"}, 405, ""),
    ("local", "/closed", {"method": "HEAD"}, 200, ""),
    ("local", "/other", {}, 404, "/closed"),
    ("local", "/closed", {"Long": 20_000 * "x"}, 431, ""),
]


@pytest.mark.parametrize(("server", "path", "more", "status", "words"), ASKED)
def test_who_is_answered_with_what(  # noqa: PLR0917 - the columns of the table
    request: pytest.FixtureRequest,
    server: str,
    path: str,
    more: dict[str, str],
    status: int,
    words: str,
) -> None:
    """A stranger is told how to show the token; without one a local address is to be named."""
    got, said = ask(request.getfixturevalue(server), path, **more)

    assert got == status
    assert words in said


def test_a_browser_is_asked_for_a_password(guarded: HttpServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=20)
    connection.request("GET", "/closed")

    assert "Basic" in (connection.getresponse().getheader("WWW-Authenticate") or "")
    connection.close()


def test_a_request_that_fails_does_so_alone(local: HttpServer) -> None:
    assert ask(local, "/failing")[0] == 500
    assert ask(local, "/closed") == (200, "closed\n")


@pytest.mark.parametrize("number", [40, 80])
def test_silent_connections_keep_others_out_for_a_few_seconds_at_most(
    local: HttpServer, number: int
) -> None:
    silent = [socket.create_connection(("127.0.0.1", local.port)) for _ in range(number)]
    try:
        assert ask(local, "/closed") == (200, "closed\n")
    finally:
        for one in silent:
            one.close()


def test_connections_that_send_a_request_slowly_keep_nobody_out(local: HttpServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", local.port)) for _ in range(100)]
    ended = threading.Event()
    sends = threading.Thread(target=send_slowly, args=(slow, ended))
    sends.start()
    try:
        for _ in range(3):
            assert ask(local, "/closed") == (200, "closed\n")
    finally:
        ended.set()
        sends.join()
        for one in slow:
            one.close()


def send_slowly(connections: list[socket.socket], ended: threading.Event) -> None:
    """A header that goes on and on."""
    text = b"GET /closed HTTP/1.1\r\nX: "
    while not ended.wait(0.2):
        for one in connections:
            with suppress(OSError):  # it was closed
                one.sendall(text)
        text = b"x"


def test_the_address_is_free_again_after_a_stop() -> None:
    with served(Door()) as first:
        assert ask(first, "/open")[0] == 200
        bind = f"127.0.0.1:{first.port}"
        with pytest.raises(ConfigError, match="key 'http_bind': cannot bind"), served(Door(), bind):
            pass

    with served(Door(), bind) as second:
        assert ask(second, "/open")[0] == 200


def test_it_is_served_at_an_ipv6_address() -> None:
    with served(Door(only_by_address=True), "[::1]:0") as server:
        assert ask(server, "/closed", host="::1") == (200, "closed\n")


CONFIG = AgentConfig(agent_id="a", peer_bind="tcp://127.0.0.1:0", events_bind="tcp://127.0.0.1:0")


def token_file(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"short\n", 0o600, "16 to 1024"),
        (b"two lines of it\nand more", 0o600, "one line"),
        ("nicht-nur-ä-sondern-auch-ö".encode(), 0o600, "printable"),
        (TOKEN.encode(), 0o644, "chmod 0600"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_wrong_token_file_is_named_with_its_key(
    tmp_path: Path, content: bytes | None, mode: int, reason: str
) -> None:
    path = str(tmp_path / "none") if content is None else token_file(tmp_path, content, mode)
    config = replaced(http_bind="0.0.0.0:0", http_token_file=path)

    with pytest.raises(ConfigError, match=reason) as refused:
        Door.open(config)

    assert "http_token_file" in refused.value.message
    assert path in refused.value.message
    assert TOKEN not in refused.value.message


def test_the_token_is_the_line_in_the_file(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"{TOKEN}\n".encode())

    assert Door.open(replaced(http_bind="0.0.0.0:0", http_token_file=path)) == Door(TOKEN)


def test_a_port_that_others_reach_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="http_token_file"):
        Door.open(replaced(http_bind="0.0.0.0:0"))

    assert Door.open(replaced(http_bind="0.0.0.0:0", insecure=True)) == Door()
    assert Door.open(replaced(http_bind="127.0.0.1:0")) == Door(only_by_address=True)


def replaced(**changes: object) -> AgentConfig:
    return msgspec.structs.replace(CONFIG, **changes)


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def pong() -> Future[None]:
    answered: Future[None] = Future()
    answered.set_result(None)
    return answered


def verdict(ask_health: Callable[[], Any]) -> tuple[str, str]:
    answer = ask_health()
    return answer.status[:3], answer.body.decode()


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
def test_what_a_function_raises_in_the_loop_is_not_taken_for_the_loop_s_own(
    error: type[Exception],
) -> None:
    def fails() -> NoReturn:
        raise error("its own")

    with running_loop() as loop, pytest.raises(error, match="its own"):
        LoopAsker(loop).ask(fails)


def test_metrics_and_live_are_read_in_the_loop() -> None:
    read_by: list[int] = []

    class Noting(Collector):
        def collect(self) -> list[Metric]:
            read_by.append(threading.get_ident())
            return []

    registry = CollectorRegistry()
    registry.register(Noting())
    read_by.clear()
    with running_loop() as loop:
        pages = AgentPages(LoopAsker(loop), registry=registry, ping=pong, report=fail)
        routes, asker = pages.routes(), LoopAsker(loop)
        of_loop = asker.ask(threading.get_ident)
        routes["/metrics"].reply({}, "")

    assert read_by == [of_loop]


def test_an_agent_whose_loop_hangs_is_not_alive_and_says_so_in_time() -> None:
    with running_loop() as loop:
        health = Health(LoopAsker(loop), pong, lambda: [])
        assert verdict(health.healthz) == verdict(health.readyz) == ("200", "ok\n")
        goes_on = threading.Event()
        loop.call_soon_threadsafe(goes_on.wait, 20)

        began = time.monotonic()
        alive, ready = verdict(health.healthz), verdict(health.readyz)
        took_s = time.monotonic() - began
        goes_on.set()

        assert alive[0] == ready[0] == "503"
        assert "event loop" in alive[1]
        assert took_s < 2 * FAILS_WITHIN_S
        assert verdict(health.healthz) == ("200", "ok\n")


def test_an_agent_whose_transport_hangs_is_not_alive() -> None:
    with running_loop() as loop:
        health = Health(LoopAsker(loop), Future, lambda: [])

        assert verdict(health.healthz)[0] == "503"
        assert "transport" in verdict(health.healthz)[1]
        assert verdict(health.readyz) == ("200", "ok\n")


def test_who_is_not_ready_says_why_and_is_alive() -> None:
    faults = [Fault("no engine", ""), Fault("draining", "")]
    with running_loop() as loop:
        health = Health(LoopAsker(loop), pong, lambda: faults)

        assert verdict(health.readyz) == ("503", "no engine\ndraining\n")
        assert verdict(health.healthz) == ("200", "ok\n")
