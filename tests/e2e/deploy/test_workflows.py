"""Workflows of GitHub call targets of the Makefile, so that CI is what users can run."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # no stubs among the dev dependencies

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
MADE = re.compile(r"\bmake ([a-z-]+|\$\{\{ matrix\.(\w+) \}\})")


def jobs_of(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


def targets_of(job: dict[str, Any]) -> set[str]:
    """The targets that its steps make; a matrix names some."""
    found, matrix = set[str](), job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        for target, key in MADE.findall(step.get("run", "")):
            found |= {value.split()[0] for value in matrix[key]} if key else {target}
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_make_targets_that_exist(path: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set[str]().union(*map(targets_of, jobs_of(path).values()))
    assert made
    assert made <= known


def test_pull_requests_run_what_ci_runs() -> None:
    steps = re.findall(r"^step make (?:--jobs \d )?(.*)$", (ROOT / ".ci/run").read_text(), re.M)
    wanted = {target for step in steps for target in step.split() if not target.startswith("venv")}
    jobs = jobs_of(ROOT / ".github/workflows/ci.yml").values()
    made = set[str]().union(*map(targets_of, jobs))
    assert made == wanted


def test_hooks_are_commands_of_make_check() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    for hook in repo["hooks"]:
        program = hook["entry"].removeprefix(".venv/bin/").replace(" --fix", "")
        assert f"$(BIN)/{program}" in makefile
