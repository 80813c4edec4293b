"""``python -m kvbus.integrations.proxy`` as it is run: its options, and how it ends."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvbus.integrations.proxy import app
from tests.agents import wait_until
from tests.integrations.proxy.site import COMMAND, WITHIN_S, Gate, Site, after, offers

SERVERS = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Starts a proxy, which a test may end."""
    with ExitStack() as stack:

        def start(*options: str) -> Site:
            site = Site(tmp_path, *options)
            stack.callback(site.end)
            return site

        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_ends_after_a_signal_before_the_proxy_does(
    started: Callable[..., Site], number: signal.Signals
) -> None:
    site, gate = started(), Gate()
    site.prefill.does(after(gate, offers()))
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(site.ask)
        site.prefill.wait_asked()

        site.process.process.send_signal(number)

        wait_until(lambda: is_refused(str(site.client.base_url)), "no new ones", WITHIN_S)
        gate.open()
        assert answer.result().status_code == 200
    assert site.process.process.wait(WITHIN_S) == 0
    assert site.lines("request.ended")[0]["outcome"] == "answered"


def test_a_request_that_does_not_end_is_aborted_after_a_signal(
    started: Callable[..., Site],
) -> None:
    site = started()
    site.prefill.does(after(Gate(), offers()))
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(site.ask)
        asked = site.prefill.wait_asked()

        site.process.process.send_signal(signal.SIGTERM)

        assert answer.result().status_code == 500
    assert asked.gone.wait(WITHIN_S)
    assert site.process.process.wait(WITHIN_S) == 0
    assert site.lines("request.ended")[0]["outcome"] == "stopped"


def is_refused(url: str) -> bool:
    """Whether nobody listens there any more."""
    try:
        httpx.get(url, trust_env=False)
    except httpx.ConnectError:
        return True
    except httpx.HTTPError:  # it was still in the queue when the port was closed
        return False
    return False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "http://127.0.0.1:2"], "--prefill"),
        ([*SERVERS, "--timeout", "0"], "--timeout"),
        ([*SERVERS, "--prefill", "127.0.0.1:8100"], "--prefill '127.0.0.1:8100'"),
        ([*SERVERS, "--decode", "ftp://host"], "--decode 'ftp://host'"),
        ([*SERVERS, "--decode", "http://[::1"], "http://[::1"),
    ],
)
def test_a_wrong_option_is_named_and_the_status_is_2(arguments: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    assert ended.exit_code == 2
    assert said in ended.stderr
    assert isinstance(ended.exception, SystemExit)  # no traceback


def run(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        env={**os.environ, **env},
    )


def test_a_port_that_is_taken_is_named_and_the_status_is_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        ended = run(*SERVERS, "--port", port)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")
    assert ended.stderr.count("\n") == 1


def test_without_a_package_of_the_extra_one_line_says_what_to_install(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('No module named uvicorn', name='uvicorn')"
    (tmp_path / "uvicorn.py").write_text(missing)

    ended = run("--help", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    assert ended.returncode == 1
    assert ended.stderr == "error: the proxy needs uvicorn: pip install 'kvbus[proxy]'\n"
