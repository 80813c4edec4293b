"""``kvbus doctor`` as it is run: what it prints, how it ends, what it leaves."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

KVBUS = [sys.executable, "-c", "from kvbus.cli import app; app()", "doctor"]
ENDS_WITHIN_S = 90.0
FEW_FILES = ["bash", "-c", 'ulimit -n 200; exec "$@"', "bash"]
KEYS = {"kvbus", "verdict", "sentence", "exit_status", "strict", "counts", "findings"}
FINDING_KEYS = {"name", "family", "severity", "found", "why", "mend", "command", "values"}
RATE = re.compile(r"[\d.]+ [GM]B/s over \S+ \(UCX_TLS")


def doctor(
    *arguments: str, before: list[str] | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(before or []), *KVBUS, *arguments],
        env={**os.environ, "COLUMNS": "80", **(env or {})},
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[str]]:
    """Options for an agent of any free ports, below the test's folder."""
    path = tmp_path / "agent.toml"
    path.write_text(
        'agent_id = "here"\npeer_bind = "tcp://127.0.0.1:0"\nevents_bind = "tcp://127.0.0.1:0"\n'
        f'runtime_dir = "{tmp_path / "run"}"\n'
    )
    return ["--config", str(path)]


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


def test_all_of_it_as_json(files: list[str]) -> None:
    mark = uuid.uuid4().hex

    ended = doctor("--json", "--timeout", "60", *files, env={"KVBUS_TEST_MARK": mark})

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


def test_people_can_read_it_in_80_columns_without_colour(files: list[str]) -> None:
    ended = doctor("--timeout", "60", *files)

    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in ended.stdout
    assert len(RATE.findall(" ".join(ended.stdout.split()))) == 3
    assert any(line.startswith("kvbus works on this machine") for line in lines)
    assert ended.stderr == ""


def test_a_port_that_is_taken_is_an_error_with_its_mend(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        path = tmp_path / "agent.toml"
        path.write_text(
            f'agent_id = "here"\npeer_bind = "{address}"\nevents_bind = "tcp://127.0.0.1:0"\n'
            f'runtime_dir = "{tmp_path / "run"}"\nmax_offers = 7\n'
        )

        ended = doctor("--only", "agents", "--config", str(path))

    assert ended.returncode == 1
    assert "kvbus does not work on this machine: agents.here.peer_bind" in ended.stdout
    assert f"{address} cannot be bound" in " ".join(ended.stdout.split())
    assert f"ss -ltnp 'sport = :{address.rpartition(':')[2]}'" in ended.stdout


def test_few_open_files_are_a_warning_that_fails_only_a_strict_one() -> None:
    plain = doctor("--only", "limits", before=FEW_FILES)
    strict = doctor("--only", "limits", "--strict", before=FEW_FILES)

    assert (plain.returncode, strict.returncode) == (0, 1)
    assert "kvbus works on this machine, with limits: limits.open_files" in plain.stdout
    assert "ulimit -n 65536" in plain.stdout


def test_a_family_that_cannot_be_looked_at_does_not_end_the_others() -> None:
    few = ["bash", "-c", 'ulimit -n 8; exec "$@"', "bash"]

    ended = doctor("--only", "processes", "--only", "limits", before=few)

    assert ended.returncode == 1
    assert "processes.unchecked" in ended.stdout
    assert "limits.open_files" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_agents_that_could_not_start_with_this_ucx_are_an_error() -> None:
    ended = doctor("--only", "nixl", "--timeout", "60", "--json", env={"UCX_TLS": "sm,self"})

    found = {one["name"]: one for one in json.loads(ended.stdout)["findings"]}
    assert ended.returncode == 1
    assert found["nixl.read.configured"]["severity"] == "error"
    assert "no peer failure handler" in found["nixl.read.configured"]["found"]
    assert found["nixl.read.tcp"]["severity"] == "ok"


def test_probes_without_time_are_told_as_such() -> None:
    ended = doctor("--only", "nixl", "--timeout", "0.1")

    assert ended.returncode == 1
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

    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --config: ")
    assert told in ended.stderr
    assert str(path) in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_family_that_is_none_is_refused() -> None:
    ended = doctor("--only", "everything")

    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("style", [[], ["--json"]])
def test_a_reader_that_went_away_is_no_failure(style: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    with os.fdopen(writing, "wb") as stdout:
        ended = subprocess.run(
            [*KVBUS, "--only", "limits", *style],
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=ENDS_WITHIN_S,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_stdout_that_is_closed_is_no_failure() -> None:
    ended = doctor("--only", "limits", before=["bash", "-c", 'exec "$@" >&-', "bash"])

    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_disk_is_told_in_a_line() -> None:
    ended = doctor("--only", "limits", before=["bash", "-c", 'exec "$@" >/dev/full', "bash"])

    assert ended.stderr.startswith("error: cannot write to stdout: ")
    assert ended.stderr.count("\n") == 1


def test_an_interrupt_ends_it_and_what_it_started() -> None:
    mark = uuid.uuid4().hex
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [*KVBUS, "--only", "nixl"],
        env={**os.environ, "KVBUS_TEST_MARK": mark, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    os.close(stderr)
    shown = read_until(terminal, "shared memory")  # it measures, and says so

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
