"""Options declared as the fields of a dataclass reach the command, and no others do."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from kvbus.options import with_options


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    name: Annotated[str, typer.Option("--of")]
    width: Annotated[int, typer.Option(min=1, help="In pixels.")] = 80
    margin: int = 2


def run(*arguments: str) -> tuple[int, str, list[DrawOptions]]:
    drawn: list[DrawOptions] = []

    @with_options(DrawOptions)
    def draw(options: DrawOptions) -> None:
        """Draw a picture."""
        drawn.append(options)

    app = typer.Typer()
    app.command()(draw)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    return result.exit_code, result.output, drawn


def test_fields_with_options_are_set_and_refused_by_name() -> None:
    status, output, _ = run("--help")
    too_narrow = run("--of", "a", "--width", "0")

    assert run("--of", "a", "--width", "7")[::2] == (0, [DrawOptions(name="a", width=7, margin=2)])
    assert (status, "margin" in output) == (0, False)
    assert "Draw a picture." in output
    assert "--width" in output
    assert (too_narrow[0], "--width" in too_narrow[1], too_narrow[2]) == (2, True, [])
