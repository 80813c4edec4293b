"""What commands write: numbers for people, names of others as text, a line about a failure."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.console import Console
from kvbus.output import fail, waiting_for, write_json, write_text
from kvbus.text import bytes_text, numbers_text, printable, rate_text, time_text
from tests.support.agents import AgentProcess
from tests.support.engines import engine, make_spec

ROOT = Path(__file__).parents[2]
HOSTILE = {
    "clears the screen": "a\x1b[2Jb",
    "title by C1": "a\x9d0;owned\x9cb",
    "other order": "a\u202eb\u2066c",
    "deleted": "a\x7fb",
    "lines": "a\u2028b\x85c",
    "tags": "a\U000e0041b",
}
PLAIN = "ü 漢字 🙂 [red]x[/nothing] :smile:"


NUMBERS: dict[Callable[[Any], str], dict[Any, str]] = {
    bytes_text: {
        0: "0 B",
        999: "999 B",
        1000: "0.9766 KiB",
        64 << 10: "64 KiB",
        3 << 39: "1.5 TiB",
    },
    rate_text: {9.314e9: "9.31 GB/s", 85e7: "850 MB/s", 12e3: "12 kB/s", 0: "0 B/s"},
    time_text: {1234.5: "1,234 s", 1.0: "1 s", 0.4082: "408 ms", 0.01371: "13.7 ms", 2e-6: "2 us"},
    numbers_text: {
        (): "",
        (7,): "7",
        (7, 2, 1, 0): "0-2, 7",
        (0, 2): "0, 2",
        (1, 3, 5): "1-5 by 2",
    },
}


def test_numbers_get_few_digits_and_unit_and_lists_intervals() -> None:
    for write, texts in NUMBERS.items():
        assert {number: write(number) for number in texts} == texts


def printed(*what: object) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system=None).print(*what)
    return out.getvalue()


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_name_is_escaped_in_a_line_a_text_and_a_table(name: str) -> None:
    table = Table("name", "value")
    table.add_row(name, "1")
    table.add_row("x" * 40, "2")

    for what in (name, Text(name), table):
        text = printed(what)
        assert text.replace("\n", "").isprintable()
        assert printable(name) in text


@given(st.text())
def test_text_is_no_markup_and_json_stays_equal_and_printable(text: str) -> None:
    safe = printable(json.dumps({text: text}, ensure_ascii=False))

    assert safe.isprintable()
    assert json.loads(safe) == {text: text}
    assert printed(PLAIN) == PLAIN + "\n"
    assert [printable(one) for one in (PLAIN, "two\nlines")] == [PLAIN, "two\nlines"]


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_failure_is_line_with_status_and_json_is_escaped_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fail(f"'{name}' is gone", status=7, cause=OSError())
    write_json({"name": name, "times_s": (1.5, None)})

    out, err = capsys.readouterr()
    assert ended.value.code == 7
    assert err == f"error: '{printable(name)}' is gone\n"
    assert out.removesuffix("\n").isprintable()
    assert json.loads(out) == {"name": name, "times_s": [1.5, None]}


@pytest.mark.anyio
async def test_an_engine_of_an_evil_name_does_no_harm_to_the_terminal(
    prefill: AgentProcess,
) -> None:
    name = "".join(HOSTILE.values())
    commands = (["status", prefill.peer], ["status", prefill.settings["http_bind"]])
    async with engine(prefill.attach, make_spec(engine_id=name)):
        shown = [
            await anyio.to_thread.run_sync(CliRunner(env={"COLUMNS": "400"}).invoke, app, command)
            for command in commands
        ]

    assert f"engine {printable(name)}" in shown[0].stdout
    for result in shown:
        assert result.exit_code == 0
        assert result.stdout.replace("\n", "").isprintable()


def test_no_command_prints_by_another_console() -> None:
    by_rich = re.compile(r"from rich(?:\.console)? import .*\b(?:Console|print)\b")
    found = [path for path in ROOT.glob("kvbus/**/*.py") if by_rich.search(path.read_text())]

    assert not found


def test_pipe_without_reader_and_closed_stdout_are_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for stdout in (os.fdopen(writing, "w"), None):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            write_text("a line\n")
        if stdout is not None:
            stdout.close()

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "write", [lambda: write_text("a line\n"), lambda: Console().print(Table("a column"))]
)
def test_a_full_disk_is_an_error_of_one_line(
    write: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:  # noqa: PTH123 - a device
        patch.setattr(sys, "stdout", full)
        write()

    assert capfd.readouterr().err == "error: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_unencodable_characters_are_escaped_and_json_unchanged(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))

    write_json({PLAIN: HOSTILE})
    Console().print(Table("ü"), PLAIN)
    write_text("plain\n")

    first, *rest = written.getvalue().decode(encoding).splitlines()
    assert json.loads(first) == {PLAIN: HOSTILE}
    assert rest[-1] == "plain"


def test_the_help_of_a_command_is_shown_without_a_locale() -> None:
    """It has the bullets of a list."""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "kvbus", "demo", "--help"]
    ended = subprocess.run(command, capture_output=True, check=False, env=env)

    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii()
    assert b"--prefill-chunk" in ended.stdout


def test_what_is_waited_for_longer_than_a_while_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()  # pytest's capture loses what a thread writes as it is read
    monkeypatch.setattr("sys.stderr", written)
    with waiting_for("the first", after_s=60) as wait_for:
        wait_for("the second")
    with waiting_for("the third", after_s=0.01):
        while not written.getvalue():
            time.sleep(0.001)

    assert written.getvalue() == "waiting for the third\n"
