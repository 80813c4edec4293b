"""Progress is for people at a terminal: nothing of it is on stdout, or on a stderr that is none."""

import os
import re
import subprocess
import sys

import pytest

from kvbus.progress import Progress

CODE = """
import time
from kvbus.output import waiting_for, write_text
from kvbus.progress import Progress

with Progress(2, in_background=False) as progress:
    for name in ("one", "two"):
        progress.begin(f"measuring {name}")
        for _ in progress.parts(4, "rounds"):
            time.sleep(0.2)
        with progress.hidden():
            write_text(f"{name} is done\\n")
with Progress(3, "requests") as progress, waiting_for("[red]agents") as wait_for:
    time.sleep(0.6)
    print("not hidden")
    for _ in range(3):
        wait_for("the next")
        progress.advance()
"""
OUTPUT = "one is done\ntwo is done\nnot hidden\n"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(stderr: int, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CODE],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", **env},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_terminal_has_steps_parts_rate_and_time_left_and_is_clean_in_the_end() -> None:
    controller, terminal = os.openpty()
    with run(terminal) as running:
        os.close(terminal)
        shown = b""
        while chunk := _read(controller):
            shown += chunk
        output, _ = running.communicate()
    os.close(controller)

    lines = ESCAPES.sub("", shown.decode()).replace("\r", "\n").splitlines()
    assert output == OUTPUT
    assert max(map(len, lines)) <= 80
    steps = [line for line in lines if re.match(r"measuring two .* 1/2 .*0:00:0\d 0:00:0\d", line)]
    parts = [line for line in lines if re.search(r" [23]/4 .*rounds/s .*0:00:0\d 0:00:0\d", line)]
    assert steps
    assert parts
    assert any(line.startswith("waiting for [red]agents ") for line in lines)
    assert not any(line.rstrip() == "waiting for the next" for line in lines)
    assert shown.endswith(b"\x1b[?25h\r\x1b[1A\x1b[2K"), "cursor shown, line erased"


def _read(controller: int) -> bytes:
    try:
        return os.read(controller, 1 << 12)
    except OSError:  # the other end was closed
        return b""


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_pipe_has_no_progress(env: dict[str, str]) -> None:
    output, errors = run(subprocess.PIPE, **env).communicate()

    assert (output, errors) == (OUTPUT, "")


def test_parts_are_counted_where_nothing_is_shown() -> None:
    assert list(Progress(1).parts(3, "rounds")) == [0, 1, 2]
