"""`kvbus bench` in small: real agents, real NIXL, every case, figures that make sense."""

import json

import pytest
import typer
from typer.testing import CliRunner, Result

from kvbus.bench.command import bench
from kvbus.bench.figures import EVERY_TIME, ONLY_WHEN_ASKED


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, ["--json", "--rounds", "1", *arguments])


@pytest.mark.timeout(600)  # it starts some twenty processes, one after the other
def test_every_case_gives_figures_in_one_line_of_json() -> None:
    result = run("--scale", "0.005")

    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])["figures"]
    assert {figure["case"] for figure in figures} == set(EVERY_TIME)
    assert all(figure["value"] >= 0 for figure in figures)


@pytest.mark.timeout(600)  # as above, and agents of its own for each round of a case
def test_other_cases_are_measured_alone_when_they_are_asked_for() -> None:
    asked = [part for name in ONLY_WHEN_ASKED for part in ("--only", name)]

    result = run("--scale", "0.005", *asked)

    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])["figures"]
    assert {figure["case"] for figure in figures} == ONLY_WHEN_ASKED


def test_an_unknown_case_is_refused() -> None:
    assert run("--only", "everything").exit_code == 2
