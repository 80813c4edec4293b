"""``kvbus top``: the token of an agent goes to that agent, whatever a server or a proxy says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from kvbus.cli import app

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


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return str(path)


def error_of(at: str, token_file: str) -> str:
    """What is told of the one agent there, which does not answer."""
    result = CliRunner().invoke(app, ["top", "--json", "--token-file", token_file, at])
    assert result.exit_code == 1
    error: str = json.loads(result.stdout)[f"http://{at}"]["error"]
    return error


def test_a_redirect_is_not_followed(token_file: str) -> None:
    with (
        serving() as (elsewhere, asked),
        serving(f"http://{elsewhere}/live") as (at, asked_first),
    ):
        error = error_of(at, token_file)

    assert "302" in error
    assert asked_first == [f"/live Bearer {TOKEN}"]
    assert asked == []


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch, token_file: str) -> None:
    with serving() as (proxy, asked_there), serving() as (at, asked):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        error = error_of(at, token_file)

    assert "404" in error
    assert asked == [f"/live Bearer {TOKEN}"]
    assert asked_there == []
