"""Options declared as the fields of a dataclass reach the command, and no others do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvbus.errors import ConfigError
from kvbus.options import with_options


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    name: Annotated[str, typer.Option("--of")]
    width: Annotated[int, typer.Option(min=1, help="In pixels.")] = 80
    margin: int = 2

    def __post_init__(self) -> None:
        if self.width > 100:
            raise ConfigError("--width is at most 100")


@pytest.fixture
def drawn() -> list[DrawOptions]:
    return []


@pytest.fixture
def draw(drawn: list[DrawOptions]) -> Callable[..., None]:
    @with_options(DrawOptions)
    def draw(options: DrawOptions) -> None:
        """Draw a picture."""
        if options.name == "nothing":
            raise ConfigError("there is nothing to draw")
        drawn.append(options)

    return draw


def run(command: Callable[..., None], *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    return result.exit_code, result.output


def test_what_is_given_and_what_is_not_become_the_dataclass(
    draw: Callable[..., None], drawn: list[DrawOptions]
) -> None:
    status, _ = run(draw, "--of", "a", "--width", "7")

    assert (status, drawn) == (0, [DrawOptions(name="a", width=7, margin=2)])


def test_a_field_without_an_option_is_none(draw: Callable[..., None]) -> None:
    status, output = run(draw, "--help")

    assert status == 0
    assert "Draw a picture." in output
    assert "--width" in output
    assert "margin" not in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--of", "a", "--width", "101"], "error: --width is at most 100\n"),
        (["--of", "nothing"], "error: there is nothing to draw\n"),
    ],
)
def test_what_the_dataclass_or_the_command_refuses_is_one_line_and_status_2(
    draw: Callable[..., None], arguments: list[str], told: str
) -> None:
    assert run(draw, *arguments) == (2, told)


def test_a_value_out_of_range_is_refused_by_name(
    draw: Callable[..., None], drawn: list[DrawOptions]
) -> None:
    status, output = run(draw, "--of", "a", "--width", "0")

    assert (status, drawn) == (2, [])
    assert "--width" in output
