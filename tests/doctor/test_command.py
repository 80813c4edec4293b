"""``kvbus doctor`` as it is run: what people see, how it ends, what it refuses.

That the report is what its findings come to holds of each run: see `running.checked`.
"""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from kvbus.cli import app
from tests.doctor.running import doctor, show

ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture
def open_files() -> Iterator[Callable[[int], None]]:
    """Sets how many files this process may open, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limit_with_free(num_files: int) -> int:
    """The limit of open files with which this process can open so many more."""
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (fd for fd in count() if fd not in used)
    return next(islice(free, num_files, None))


@pytest.mark.parametrize(
    ("limit", "plain", "strict", "sentence"),
    [
        (4096, 0, 0, "kvbus works on this machine\n"),
        (200, 0, 1, "kvbus works on this machine, with limits: limits.open_files\n"),
        (60, 1, 1, "kvbus does not work on this machine: limits.open_files\n"),
    ],
)
def test_a_warning_fails_only_a_strict_one_and_an_error_each(
    open_files: Callable[[int], None], limit: int, plain: int, strict: int, sentence: str
) -> None:
    show("--only", "limits")  # what is imported late is here, now
    open_files(limit)

    shown, shown_strict = show("--only", "limits"), show("--only", "limits", "--strict")
    found = doctor("--only", "limits", "--strict")

    assert (shown.exit_code, shown_strict.exit_code) == (plain, strict)
    assert sentence in shown.stdout
    assert ("ulimit -n 65536" in shown.stdout) == (limit < 4096)
    assert found["limits.open_files"]["values"] == {"open_files": limit}


def test_a_line_is_no_longer_than_the_terminal_and_has_no_colour_elsewhere() -> None:
    shown = show("--only", "limits", "--only", "memory", "--only", "versions")

    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\x1b" not in shown.stdout
    assert shown.stderr == ""


def test_a_family_that_cannot_be_looked_at_does_not_end_the_others(
    open_files: Callable[[int], None],
) -> None:
    show("--only", "limits")  # what is imported late is here, now
    open_files(limit_with_free(3))

    ended = show("--only", "processes", "--only", "limits")

    assert ended.exit_code == 1
    assert "processes.unchecked" in ended.stdout
    assert "limits.open_files" in ended.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot read"),
        ("agent_id =", "is not TOML"),
        ('agent_id = "a"\npeer_bind = "x"\nevents_bind = "tcp://h:1"\n', "key 'peer_bind'"),
        ('agent_id = "a"\npeer_bind = 7\nevents_bind = "tcp://h:2"\n', "key 'peer_bind'"),
    ],
)
def test_a_bad_config_is_one_line_and_status_2(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "agent.toml"
    if text is not None:
        path.write_text(text)

    ended = show("--config", str(path))

    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: --config: ")
    assert told in ended.stderr
    assert str(path) in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("key", ["max_offers", "max_fetches"])
def test_the_keys_of_each_role_may_be_in_its_file(tmp_path: Path, key: str) -> None:
    path = tmp_path / "agent.toml"
    binds = f'peer_bind = "{ANY_PORT}"\nevents_bind = "{ANY_PORT}"\n'
    path.write_text(f'agent_id = "a"\n{binds}runtime_dir = "{tmp_path / "run"}"\n{key} = 7\n')

    assert "agents.a.ports" in doctor("--only", "agents", "--config", str(path))


def test_a_family_that_is_none_is_refused() -> None:
    ended = show("--only", "everything")

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


def test_the_help_says_what_each_exit_status_means() -> None:
    shown = show("--help").stdout

    assert "Exit status 0: no error, kvbus works. 1: an error," in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
