"""``kvbus trace`` where no agent answers: one line, and an exit status."""

import socket

from typer.testing import CliRunner

from kvbus.cli import app


def test_no_answer_is_a_warning_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        result = CliRunner().invoke(app, ["trace", "r", "--peer", endpoint, "--timeout", "0.1"])

    warning, error = result.stderr.splitlines()
    assert result.exit_code == 1
    assert warning.startswith(f"warning: {endpoint}: timeout: ")
    assert error.startswith("error: no agent answered")


def test_an_endpoint_that_is_none_is_refused_with_status_2() -> None:
    result = CliRunner().invoke(app, ["trace", "r", "--peer", "nowhere"])

    assert result.exit_code == 2
    assert "nowhere" in result.stderr
