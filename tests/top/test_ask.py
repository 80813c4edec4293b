"""The token of an agent goes to that agent, whatever a server or the environment says."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kvbus.errors import PeerLost
from kvbus.top.ask import HttpAgent

TOKEN = "a-token-of-some-length"


@contextmanager
def serving(redirect_to: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server that redirects or refuses, at HOST:PORT; the lines of the requests that it had."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(302 if redirect_to else 404)
            if redirect_to:
                self.send_header("Location", redirect_to)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: the output is the test's."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_redirect_is_not_followed() -> None:
    with (
        serving() as (elsewhere, asked),
        serving(f"http://{elsewhere}/live") as (at, asked_first),
        pytest.raises(PeerLost, match="302"),
    ):
        HttpAgent.at(at, TOKEN).look(timeout_s=5.0)

    assert asked_first == [f"/live Bearer {TOKEN}"]
    assert asked == []


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (proxy, asked_there), serving() as (at, asked):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        with pytest.raises(PeerLost, match="404"):
            HttpAgent.at(at, TOKEN).look(timeout_s=5.0)

    assert asked == [f"/live Bearer {TOKEN}"]
    assert asked_there == []
