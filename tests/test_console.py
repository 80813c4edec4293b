"""Names that others have chosen reach a terminal as text, by every command and by the logs."""

import io
import json
import re
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.console import Console
from kvbus.engine import PrefillSession
from kvbus.output import fail, write_json
from kvbus.text import printable
from tests.agents import Agents
from tests.engines import make_spec

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parent.parent
HOSTILE = {
    "clears the screen": "a\x1b[2Jb",
    "title by C1": "a\x9d0;owned\x9cb",
    "other order": "a\u202eb\u2066c",
    "deleted": "a\x7fb",
    "lines": "a\u2028b\x85c",
    "tags": "a\U000e0041b",
}
PLAIN = "ü 漢字 🙂 [red]x[/nothing] :smile:"


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


def test_what_is_printable_stays_as_it_is_and_is_no_markup() -> None:
    assert printed(PLAIN) == PLAIN + "\n"
    assert printable(PLAIN) == PLAIN
    assert printable("two\nlines") == "two\nlines"


@given(st.text())
def test_json_stays_what_it_is_with_every_character_printable(text: str) -> None:
    safe = printable(json.dumps({text: text}, ensure_ascii=False))

    assert safe.isprintable()
    assert json.loads(safe) == {text: text}


def test_what_fails_and_what_is_json_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for name in HOSTILE.values():
        with pytest.raises(SystemExit):
            fail(f"'{name}' is gone", status=1, cause=OSError())
        write_json({"name": name})

        out, err = capsys.readouterr()
        assert err == f"error: '{printable(name)}' is gone\n"
        assert out.removesuffix("\n").isprintable()
        assert json.loads(out) == {"name": name}


async def test_an_engine_of_an_evil_name_does_no_harm_to_the_terminals_of_status_and_top(
    fresh: Agents,
) -> None:
    prefill = fresh.prepare("prefill")
    fresh.start(prefill)
    name = "".join(HOSTILE.values())
    commands = (["status", prefill.peer], ["top", prefill.settings["http_bind"], "--once"])
    async with PrefillSession(prefill.attach, make_spec(engine_id=name)) as engine:
        await engine.register()

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
