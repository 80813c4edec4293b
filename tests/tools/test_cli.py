"""``kvbus``: each command is imported when it is called, and the list has the line of its help."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbus.cli import COMMANDS, PANELS, app

OPTIONS = ("Options", "--version", "--install-completion", "--show-completion", "--help")
HEAVY = ("zmq", "nixl", "numpy", "torch", "anyio")


def run(command: list[str], **env: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def path_with(folder: Path) -> str:
    return os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))


def test_the_list_of_commands_is_shown_without_what_they_need() -> None:
    code = f"""
import sys
from kvbus.cli import app
try:
    app(["--help"])
except SystemExit:
    sys.exit(str([name for name in {HEAVY} if name in sys.modules]))
"""
    ended = run([sys.executable, "-c", code])

    assert "bench-decode" in ended.stdout
    assert ended.stderr == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_begins_with_its_line_of_the_list(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})

    assert shown.exit_code == 0
    assert COMMANDS[name][1] in shown.stdout


def test_help_hides_switch_types_and_groups_commands() -> None:
    shown = [CliRunner().invoke(app, [*name, "--help"]).stdout for name in ([], ["keys", "show"])]

    assert not [text for text in shown if "<bool>" in text or "<file>" in text]
    listed = re.findall(r"^(?:╭─ |│ )([A-Za-z-]+)", shown[0], re.MULTILINE)
    assert listed == [*OPTIONS, *(one for panel in PANELS for one in (panel, *PANELS[panel]))]
    assert {name for names in PANELS.values() for name in names} == COMMANDS.keys()


def test_unknown_command_is_told_with_similar_one() -> None:
    ended = CliRunner().invoke(app, ["doctr"])

    assert (ended.exit_code, ended.stdout) == (2, "")
    assert "Did you mean 'doctor'?" in ended.stderr


PROGRAMS = ["kvbus doctor", "kvbus_prefill x.toml", "kvbus_decode x.toml"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_missing_package_is_named_without_traceback(tmp_path: Path, program: str) -> None:
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError('not here', name=__name__)\n")

    ended = run([sys.executable, "-m", *program.split()], PYTHONPATH=path_with(tmp_path))

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: the package 'zmq' is not installed here: agents")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("importing", ["msgspec", "zmq"])
def test_ctrl_c_during_import_ends_program_without_traceback(
    tmp_path: Path, program: str, importing: str
) -> None:
    """A package that interrupts the process in the middle of its own import."""
    (tmp_path / f"{importing}.py").write_text(
        "import os, signal\n"
        "print('in the middle', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "raise SystemExit('an import that goes on')\n"
    )

    ended = run([sys.executable, "-m", *program.split()], PYTHONPATH=path_with(tmp_path))

    assert (ended.stdout, ended.stderr) == ("in the middle\n", "")
    assert ended.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("demo --requests some", "'--requests': must be an integer"),
        ("demo --requests 0", "'--requests': must be at least 1"),
        ("demo --path slow", "'--path': 'slow' is not one of 'direct', 'staged', 'packed'"),
        ("demo --prefill tp=some", "--prefill: 'tp' must be an integer, not a string"),
        ("demo --prefill layers=3", "--prefill: 'layers' is unknown"),
        ("demo --prefill layout=DNH", "layout 'dnh' is not NHD, HND or a list of block, layer,"),
        ("demo --prompt-file /nowhere", "cannot read /nowhere"),
        ("demo --decode pp=5", "--decode: 'pp' must be at most 4"),
        ("demo --decode ring=0.2", "--decode: a ring of 0.2 of a cache for 4 requests does not"),
        ("plan --from attention=some --to tp=1 --tokens 9", "'attention' cannot be 'some'"),
        ("status --timeout soon", "'--timeout': must be a number"),
        ("status tcp://127.0.0.1:1 --events --only ofer.*", "ofer"),
        ("status 127.0.0.1:7703 --events", "--events"),
        ("status nowhere", "nowhere"),
        ("conform --role router -- x", "'--role': 'router' is not one of 'prefill', 'decode'"),
        ("bench --only everything", "everything"),
        ("bench --plot figures.pdf", "--plot: figures.pdf does not end in .svg or .png"),
        ("bench --plot /nowhere/a.svg", "cannot write /nowhere/a.svg: No such file or directory"),
        ("doctor --only everything", "--only: 'everything' is none of versions"),
        ("doctor --only peer", "--only peer needs --peer"),
        ("doctor --peer 127.0.0.1:7701", "is not tcp://HOST:PORT"),
        ("doctor --peer tcp://127.0.0.1:7701 --server-key x", "--key-file"),
        ("doctor --peer tcp://h:1 --from tcp://h:1", "are the same agent"),
        ("doctor --peer tcp://h:1 --from-server-key x", "--from-server-key needs --from"),
    ],
)
def test_a_wrong_option_is_named_without_the_words_of_a_library(line: str, message: str) -> None:
    ended = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200"})

    assert (ended.exit_code, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert not re.search(r"`|\$|Expected|Input should|Value error|not a valid|Errno", ended.stderr)
