"""``kvbus doctor`` as it is run: what it prints, how it ends, what it leaves."""

import json
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from io import StringIO
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.doctor.finding import Finding
from kvbus.doctor.report import print_report
from kvbus.keys import Role
from tests.keyring import KeyRing

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()", "doctor"]
ENDS_WITHIN_S = 90.0
KEYS = {"kvbus", "verdict", "sentence", "exit_status", "strict", "counts", "findings"}
FINDING_KEYS = {"name", "family", "severity", "found", "why", "fix", "command", "values"}
RATE = re.compile(r"[\d.]+ [GM]B/s over \S+ \(UCX_TLS")


def doctor(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80", **(env or {})})


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options for an agent of any free ports, below the test's folder."""
    path = tmp_path / "agent.toml"
    path.write_text(
        'agent_id = "here"\npeer_bind = "tcp://127.0.0.1:0"\nevents_bind = "tcp://127.0.0.1:0"\n'
        f'runtime_dir = "{tmp_path / "run"}"\n'
    )
    return ["--config", str(path)]


@pytest.fixture
def open_files() -> Iterator[Any]:
    """Sets how many files this process may open, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limit_with_free(num_files: int) -> int:
    """The limit of open files with which this process can open so many more."""
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (fd for fd in count() if fd not in used)
    return next(islice(free, num_files, None))


def marked(mark: str) -> list[str]:
    """The command lines of the processes that have this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it has ended, or is not ours
    return found


def test_all_of_it_as_json_and_for_people(files: list[str]) -> None:
    mark = uuid.uuid4().hex

    ended = subprocess.run(
        [*KVBUS, "--json", "--timeout", "60", *files],
        env={**os.environ, "DOCTOR_TEST_MARK": mark},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )

    found: dict[str, Any] = json.loads(ended.stdout)
    findings = {one["name"]: one for one in found["findings"]}
    assert found.keys() == KEYS
    assert all(one.keys() == FINDING_KEYS for one in found["findings"])
    assert {one["family"] for one in found["findings"]} == {
        *("versions", "memory", "limits", "processes", "nixl", "cuda", "agents")
    }
    assert not any(name.endswith("unchecked") for name in findings)
    assert sum(found["counts"].values()) == len(findings)
    assert found["exit_status"] == ended.returncode == int(found["verdict"] == "broken")
    assert findings["nixl.read.tcp"]["values"]["bytes_per_s"] > 1e6
    assert findings["nixl.read.configured"]["values"].keys() == {
        *("ucx_tls", "wire", "bytes_per_s", "error")
    }
    assert findings["agents.here.runtime_dir"]["severity"] == "ok"
    assert ended.stderr == ""
    assert marked(mark) == []
    assert_people_can_read_it(msgspec.convert(found["findings"], list[Finding]))


def assert_people_can_read_it(findings: list[Finding]) -> None:
    """In 80 columns, without colour."""
    shown = StringIO()

    print_report(findings, Console(file=shown, width=80, highlight=False))

    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in shown.getvalue()
    assert len(RATE.findall(" ".join(shown.getvalue().split()))) == 3
    assert any(line.startswith("kvbus works on this machine") for line in lines)


def test_a_line_is_no_longer_than_the_terminal_and_has_no_colour_elsewhere() -> None:
    ended = doctor("--only", "limits", "--only", "memory")

    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert "\x1b" not in ended.stdout
    assert ended.stderr == ""


def test_an_agent_that_trusts_its_own_key_alone_is_warned(files: list[str], tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    ring.trust("here", Role.PREFILL)
    env = {f"KVBUS_{key.upper()}": value for key, value in ring.settings("here").items()}

    alone = doctor("--only", "agents", *files, env=env)
    ring.trust("other", Role.DECODE)
    both = doctor("--only", "agents", *files, env=env)

    assert "with limits: agents.here.keys" in alone.stdout
    assert "authorized_keys trusts no other key as decode or prefill" in " ".join(
        alone.stdout.split()
    )
    assert "kvbus works on this machine\n" in both.stdout


def test_a_port_that_is_taken_is_an_error_with_its_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        path = tmp_path / "agent.toml"
        path.write_text(
            f'agent_id = "here"\npeer_bind = "{address}"\nevents_bind = "tcp://127.0.0.1:0"\n'
            f'runtime_dir = "{tmp_path / "run"}"\nmax_offers = 7\n'
        )

        ended = doctor("--only", "agents", "--config", str(path))

    assert ended.exit_code == 1
    assert "kvbus does not work on this machine: agents.here.peer_bind" in ended.stdout
    assert f"{address} cannot be bound" in " ".join(ended.stdout.split())
    assert f"ss -ltnp 'sport = :{address.rpartition(':')[2]}'" in ended.stdout


def test_few_open_files_are_a_warning_that_fails_only_a_strict_one(open_files: Any) -> None:
    open_files(200)

    plain = doctor("--only", "limits")
    strict = doctor("--only", "limits", "--strict")

    assert (plain.exit_code, strict.exit_code) == (0, 1)
    assert "kvbus works on this machine, with limits: limits.open_files" in plain.stdout
    assert "ulimit -n 65536" in plain.stdout


def test_a_family_that_cannot_be_looked_at_does_not_end_the_others(open_files: Any) -> None:
    doctor("--only", "limits")  # what is imported late is here, now
    open_files(limit_with_free(3))

    ended = doctor("--only", "processes", "--only", "limits")

    assert ended.exit_code == 1
    assert "processes.unchecked" in ended.stdout
    assert "limits.open_files" in ended.stdout


def test_probes_without_time_are_told_as_such() -> None:
    ended = doctor("--only", "nixl", "--timeout", "0.1")

    assert ended.exit_code == 1
    assert "no answer within 0.05 s" in " ".join(ended.stdout.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("agent_id =", "is not TOML"),
        ('agent_id = "a"\npeer_bind = "x"\nevents_bind = "tcp://h:1"\n', "key 'peer_bind'"),
    ],
)
def test_a_bad_config_is_one_line_and_status_2(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "agent.toml"
    if text is not None:
        path.write_text(text)

    ended = doctor("--config", str(path))

    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: --config: ")
    assert told in ended.stderr
    assert str(path) in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_family_that_is_none_is_refused() -> None:
    ended = doctor("--only", "everything")

    assert ended.exit_code == 2
    assert "Invalid value for '--only'" in ended.stderr


@pytest.mark.parametrize("style", [[], ["--json"]])
def test_a_reader_that_went_away_is_no_failure(
    style: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    with os.fdopen(writing, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            app(["doctor", "--only", "limits", *style])

    assert ended.value.code == 0
    assert capfd.readouterr().err == ""


def test_an_interrupt_ends_it_and_what_it_started() -> None:
    mark = uuid.uuid4().hex
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [*KVBUS, "--only", "nixl"],
        env={**os.environ, "DOCTOR_TEST_MARK": mark, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    os.close(stderr)
    shown = read_until(terminal, "configured")  # a pair of processes measures

    process.send_signal(signal.SIGINT)

    stdout, _ = process.communicate(timeout=ENDS_WITHIN_S)
    shown += rest_of(terminal)
    os.close(terminal)
    assert process.returncode == 130
    assert stdout == b""
    assert "Traceback" not in shown
    assert marked(mark) == []


def read_until(fd: int, text: str) -> str:
    shown = ""
    while text not in shown:
        shown += os.read(fd, 4096).decode(errors="replace")
    return shown


def rest_of(fd: int) -> str:
    shown = ""
    try:
        while more := os.read(fd, 4096):
            shown += more.decode(errors="replace")
    except OSError:  # how Linux tells that the other end of a terminal is closed
        pass
    return shown


def test_the_help_says_what_each_exit_status_means() -> None:
    ended = doctor("--help")

    text = " ".join(ended.stdout.split())
    assert "Exit status 0: no error, kvbus works. 1: an error, or with --strict a warning." in text
    assert max(map(len, ended.stdout.splitlines())) <= 80
