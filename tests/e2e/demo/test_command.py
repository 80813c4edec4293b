"""What the demo reports, and its help."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from kvbus.demo.options import DemoOptions, Step
from kvbus.demo.report import DemoReport, Served


def test_uncompared_outputs_are_told_from_differing_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, wrong = Step(1, "a"), Step(2, "b")
    served = [
        Served("r1", "compared", first=right, steps=[right]),
        Served("r2", "compared", first=right, steps=[wrong]),
        Served("r3", "not yet", first=right, steps=[right]),
    ]
    report = DemoReport(DemoOptions(requests=9), served, alone={"compared": [right, right]})

    report.print()

    told, found = capsys.readouterr().out, report.summary()
    assert (found["matched"], found["uncompared"], found["unfinished"]) == (1, 1, 6)
    assert "1 outputs equal" in told
    assert "the output of request r2 differs" in told
    assert "1 finished and were not compared\n6 did not finish" in told


@pytest.mark.parametrize(
    ("leaks", "trouble", "is_ok"),
    [
        ({"prefill": 0, "decode": 0}, [], True),
        ({"prefill": 0, "decode": 1}, [], False),
        (None, [], False),
        ({"prefill": 0, "decode": 0}, ["the decode agent was ended"], False),
    ],
)
def test_leaked_or_uncounted_blocks_or_trouble_fail_the_run(
    leaks: dict[str, int] | None, trouble: list[str], is_ok: bool
) -> None:
    report = DemoReport(DemoOptions(requests=0), leaks=leaks, trouble=trouble)

    assert report.ok == is_ok
    assert report.summary()["leaked_blocks"] == (leaks and sum(leaks.values()))


def test_help_has_80_columns_and_commands_start_without_torch() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "80"})
    code = "import kvbus.demo.run, sys; sys.exit('torch' in sys.modules)"

    assert "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert CliRunner().invoke(app, ["--version"]).output.startswith("kvbus 0.")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
