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

from kvbus.integrations.proxy.command import app
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


@pytest.mark.parametrize(
    ("number", "grace", "outcome", "status"),
    [(signal.SIGTERM, "60", "completed", 200), (signal.SIGINT, "0", "stopped", 500)],
)
def test_a_request_has_the_grace_to_end_after_a_signal_and_is_aborted_after_it(
    started: Callable[..., Site], number: signal.Signals, grace: str, outcome: str, status: int
) -> None:
    site, gate = started("--grace", grace), Gate()
    site.prefill.does(after(gate, offers()))
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(site.ask)
        asked = site.prefill.wait_asked()

        site.process.process.send_signal(number)

        if outcome == "completed":
            wait_until(lambda: is_refused(str(site.client.base_url)), "no new ones", WITHIN_S)
            gate.open()
        assert answer.result().status_code == status
    assert asked.gone.is_set() == (outcome == "stopped")
    assert site.process.process.wait(WITHIN_S) == 0
    assert site.lines("request.ended")[0]["outcome"] == outcome
    assert len(site.lines("proxy.ended")) == 1


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
        ([*SERVERS, "--health-interval", "0"], "--health-interval"),
        ([*SERVERS, "--prefill", "127.0.0.1:8100"], "--prefill '127.0.0.1:8100'"),
        ([*SERVERS, "--decode", "ftp://host"], "--decode 'ftp://host'"),
        ([*SERVERS, "--decode", "http://[::1"], "http://[::1"),
        ([*SERVERS, "--decode", "http://me:secret@host:1"], "http://me:secret@host:1"),
        ([*SERVERS, "--decode", "http://host:1/?a=1"], "http://host:1/?a=1"),
        ([*SERVERS, "--prefill", "http://127.0.0.1:2/"], "http://127.0.0.1:2 is given twice"),
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
