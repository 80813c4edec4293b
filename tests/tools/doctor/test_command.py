"""``kvbus doctor`` as it is run: what people see, how it ends, what it refuses.

That the report is what its findings come to holds of each run: see `running.checked`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.doctor.running import checked, show


def limited(limit: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own that may open ``limit`` files."""
    command = [sys.executable, "-m", "kvbus", "doctor", "--only", "limits", *arguments]
    shell = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command]
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(shell, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize(
    ("limit", "plain", "strict", "sentence"),
    [
        (4096, 0, 0, "kvbus works on this machine\n"),
        (200, 0, 1, "kvbus works on this machine, with limits: limits.open_files\n"),
        (60, 1, 1, "kvbus does not work on this machine: limits.open_files\n"),
    ],
)
def test_a_warning_fails_only_a_strict_one_and_an_error_each(
    limit: int, plain: int, strict: int, sentence: str
) -> None:
    shown, shown_strict = limited(limit), limited(limit, "--strict", "--json")
    found = checked(json.loads(shown_strict.stdout), status=strict)

    assert (shown.returncode, shown_strict.returncode) == (plain, strict)
    assert sentence in shown.stdout
    assert ("ulimit -n 65536" in shown.stdout) == (limit < 4096)
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\x1b" not in shown.stdout
    assert shown.stderr == ""
    assert found["limits.open_files"]["values"] == {"open_files": limit}


FULL = """
import resource, sys
from itertools import count, islice
from pathlib import Path
from tests.tools.doctor.running import show

show("--only", "limits")  # what is imported late is here, now
used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
limit = next(islice((fd for fd in count() if fd not in used), 3, None))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # three more can be opened
ended = show("--only", "nixl", "--only", "limits")
sys.exit(f"{ended.exit_code} {ended.stdout}")
"""
"""Run in a new process: a process that has run other tests has more open files."""


def test_family_failing_to_be_checked_does_not_end_others() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL], check=False, capture_output=True, text=True
    )

    assert ended.stderr.startswith("1 ")
    assert "nixl.unchecked" in ended.stderr
    assert "limits.open_files" in ended.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("agent_id =", "is not TOML"),
        ('agent_id = "a"\npeer_bind = "127.0.0.1:0"\nevents_bind = "tcp://h:0"\n', "peer_bind"),
    ],
)
def test_a_bad_config_is_one_line_and_status_2(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "agent.toml"
    if text is not None:
        path.write_text(text)

    ended = show("--config", str(path))

    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("error: --config: ")
    assert told in ended.stderr
    assert str(path) in ended.stderr
