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
    """The status, the output, and what was drawn."""
    drawn: list[DrawOptions] = []

    @with_options(DrawOptions)
    def draw(options: DrawOptions) -> None:
        """Draw a picture."""
        drawn.append(options)

    app = typer.Typer()
    app.command()(draw)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    return result.exit_code, result.output, drawn


def test_what_is_given_and_what_is_not_become_the_dataclass() -> None:
    status, _, drawn = run("--of", "a", "--width", "7")

    assert (status, drawn) == (0, [DrawOptions(name="a", width=7, margin=2)])


def test_a_field_without_an_option_is_none() -> None:
    status, output, _ = run("--help")

    assert (status, "margin" in output) == (0, False)
    assert "Draw a picture." in output
    assert "--width" in output


def test_a_value_out_of_range_is_refused_by_name() -> None:
    status, output, drawn = run("--of", "a", "--width", "0")

    assert (status, drawn) == (2, [])
    assert "--width" in output
