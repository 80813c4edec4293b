"""``kvbus status`` sends the token of an agent to that agent alone."""

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
def serving(redirect_to: str = "http://nowhere") -> Iterator[tuple[str, list[str]]]:
    """A server that redirects, at HOST:PORT; the lines of the requests that it had."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(302)
            self.send_header("Location", redirect_to)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: the output is the test's."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_neither_a_redirect_is_followed_nor_a_proxy_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    with (
        serving() as (elsewhere, asked_elsewhere),
        serving(f"http://{elsewhere}/live") as (at, asked),
    ):
        monkeypatch.setenv("http_proxy", f"http://{elsewhere}")
        monkeypatch.delenv("no_proxy", raising=False)
        arguments = ["status", "--json", "--token-file", str(token_file), at]
        result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 1
    assert "302" in json.loads(result.stdout)[f"http://{at}"]["error"]
    assert asked == [f"/live Bearer {TOKEN}"]
    assert asked_elsewhere == []
