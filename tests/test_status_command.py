"""``kvbus status`` where no agent answers: one line, and an exit status."""

import socket

from typer.testing import CliRunner

from kvbus.cli import app


def test_no_answer_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        result = CliRunner().invoke(app, ["status", endpoint, "--timeout", "0.1"])

    assert result.exit_code == 1
    assert result.stderr == f"error: no agent answered at {endpoint} within 0.1 s\n"
    assert result.stdout == ""


def test_an_endpoint_that_is_none_is_refused_with_status_2() -> None:
    result = CliRunner().invoke(app, ["status", "nowhere"])

    assert result.exit_code == 2
    assert result.stdout == ""
