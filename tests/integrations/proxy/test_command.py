"""``python -m kvbus.integrations.proxy`` as it is run: its options, its lines, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvbus.integrations.proxy.command import app
from tests.agents import wait_until
from tests.integrations.proxy.conftest import StartEngine
from tests.integrations.proxy.engines import WITHIN_S, Engine, Gate, streams

COMMAND = [sys.executable, "-m", "kvbus.integrations.proxy"]
SERVERS = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
ASKED = {"model": "m", "prompt": [1, 2, 3], "stream": True}
EVENT = b"data: {}\n\n"


class Command:
    """The proxy as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def kill(self) -> None:
        """End it, if it was started and is still there."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def start(self, *options: str) -> str:
        """Returns its address."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*COMMAND, "--port", "0", *options], stdout=log, stderr=log
            )
        wait_until(lambda: self.lines("proxy.started") or self.process.poll() is not None, "up")
        assert self.process.poll() is None, self.text
        return str(self.lines("proxy.started")[0]["url"])

    @property
    def text(self) -> str:
        return self._log.read_text()

    def lines(self, event: str) -> list[dict[str, object]]:
        """Every line is JSON, or this fails."""
        lines = [json.loads(line) for line in self.text.splitlines(keepends=True) if "\n" in line]
        return [line for line in lines if line["event"] == event]

    def end(self, number: int) -> int:
        """Its exit status after this signal."""
        self.process.send_signal(number)
        return self.process.wait(WITHIN_S)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    made.kill()


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        env={**os.environ, "COLUMNS": "200", **env},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_idle_proxy_with_status_0_and_no_traceback(
    command: Command, prefill: Engine, decode: Engine, number: signal.Signals
) -> None:
    url = command.start("--prefill", prefill.url, "--decode", decode.url)
    served = httpx.post(f"{url}/v1/completions", json=ASKED, trust_env=False).status_code

    status = command.end(number)

    assert (served, status) == (200, 0)
    assert command.lines("request.ended")[0]["outcome"] == "completed"
    assert len(command.lines("proxy.ended")) == 1


def test_ctrl_c_aborts_what_is_still_running_after_the_grace(
    command: Command, prefill: Engine, engine: StartEngine
) -> None:
    decode = engine(streams(EVENT, Gate()))
    url = command.start("--prefill", prefill.url, "--decode", decode.url, "--grace", "0")

    with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, trust_env=False) as answer:
        parts = answer.iter_raw()
        first = next(parts)
        status = command.end(signal.SIGINT)

    assert (first, status) == (EVENT, 0)
    assert decode.first().gone.wait(WITHIN_S)
    assert command.lines("request.ended")[0]["outcome"] == "stopped"
    assert command.lines("request.broken") == []


def test_ctrl_c_lets_a_request_end_within_the_grace(
    command: Command, prefill: Engine, engine: StartEngine
) -> None:
    gate = Gate()
    decode = engine(streams(EVENT, gate, EVENT))
    url = command.start("--prefill", prefill.url, "--decode", decode.url, "--grace", "60")

    with httpx.stream("POST", f"{url}/v1/completions", json=ASKED, trust_env=False) as answer:
        parts = answer.iter_raw()
        first = next(parts)
        command.process.send_signal(signal.SIGINT)
        wait_until(lambda: refuses(url), "no new connections", WITHIN_S)
        gate.open()
        rest = b"".join(parts)

    assert (first, rest) == (EVENT, EVENT)
    assert command.process.wait(WITHIN_S) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "http://127.0.0.1:2"], "--prefill"),
        (["--prefill", "http://127.0.0.1:1"], "--decode"),
        ([*SERVERS, "--port", "70000"], "--port"),
        ([*SERVERS, "--health-interval", "0"], "--health-interval"),
        ([*SERVERS, "--max-in-flight", "0"], "--max-in-flight"),
        ([*SERVERS, "--if-prefill-fails", "panic"], "panic"),
        ([*SERVERS, "--log-format", "xml"], "xml"),
        ([*SERVERS, "--prefill", "127.0.0.1:8100"], "--prefill '127.0.0.1:8100'"),
        ([*SERVERS, "--decode", "ftp://host"], "--decode 'ftp://host'"),
        ([*SERVERS, "--decode", "http://"], "--decode 'http://'"),
        ([*SERVERS, "--decode", "http://host:99999"], "http://host:99999"),
        ([*SERVERS, "--decode", "http://host:no"], "http://host:no"),
        ([*SERVERS, "--decode", "http://[::1"], "http://[::1"),
        ([*SERVERS, "--decode", "http://ho st:1"], "http://ho st:1"),
        ([*SERVERS, "--decode", "http://h\xf6st:1"], "is not the address of a server"),
        ([*SERVERS, "--decode", "http://me:secret@host:1"], "http://me:secret@host:1"),
        ([*SERVERS, "--decode", "http://host:1/?a=1"], "http://host:1/?a=1"),
        ([*SERVERS, "--prefill", "http://127.0.0.1:1/"], "http://127.0.0.1:1 is given twice"),
        ([*SERVERS, "--prefill", "http://127.0.0.1:2"], "http://127.0.0.1:2 is given twice"),
    ],
)
def test_a_wrong_option_is_named_and_the_status_is_2(arguments: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})

    assert ended.exit_code == 2
    assert said in ended.stderr
    assert isinstance(ended.exception, SystemExit)  # no traceback


def test_a_port_that_is_taken_is_named_and_the_status_is_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        ended = run(*SERVERS, "--port", port)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")
    assert ended.stderr.count("\n") == 1


def test_the_help_names_every_option() -> None:
    ended = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})

    assert ended.exit_code == 0
    for option in ("--prefill", "--decode", "--host", "--port", "--if-prefill-fails", "--grace"):
        assert option in ended.stdout


@pytest.mark.parametrize("package", ["starlette", "httpx", "uvicorn"])
def test_without_a_package_of_the_extra_one_line_says_what_to_install(
    tmp_path: Path, package: str
) -> None:
    (tmp_path / f"{package}.py").write_text(
        f"raise ModuleNotFoundError('No module named {package}', name='{package}')"
    )

    ended = run("--help", PYTHONPATH=str(tmp_path))

    assert ended.returncode == 1
    assert ended.stderr == f"error: the proxy needs {package}: pip install 'kvbus[proxy]'\n"


def refuses(url: str) -> bool:
    """Whether nobody listens there any more."""
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), WITHIN_S).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # it was still in the queue when the port was closed
        return False
    return False
