"""Runs tests, and believes the report alone: ``python -m tests.tools.runner [arguments of
pytest]``.

It ends with 0 only if each test that was collected has passed, or was skipped for a reason that
``tests/forgiven.toml`` has. On a busy machine a test of real processes may fail by bad luck, or die
with its worker before it ran: at most `MAX_AGAIN` such tests run once more, alone, and are shown
with their first output. Where the variable ``TESTS_IN_CI`` is set, few skips are forgiven.

Tests marked ``long`` are left out, or with ``--long`` run with the others, each with more examples.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tools.runner.report import OPTION

FORGIVEN = Path("tests", "forgiven.toml")
IN_CI = "TESTS_IN_CI"
"""Not ``CI``, which Hypothesis takes for a wish to draw the same examples each time."""
MAX_AGAIN = 5
MAX_DEATHS = 20
"""Each worker that died has a successor, which collects all tests again, up to so many."""
MAX_LINES = 20
NUM_SLOWEST = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What became of each test of a run; ``uncollected`` are modules that cannot be imported."""

    collected: list[str]
    passed: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]
    uncollected: dict[str, str]
    seconds: dict[str, float]

    @property
    def lost(self) -> list[str]:
        """Tests that never came to an end."""
        ended = {*self.passed, *self.skipped, *self.failed}
        return [name for name in self.collected if name not in ended]


class Forgiven:
    """Which tests may run again, and which skips are no failure."""

    def __init__(self, path: Path, *, is_ci: bool) -> None:
        told = tomllib.loads(path.read_text())
        self._processes: list[str] = told["processes"]
        self._pure: list[str] = told["pure"]
        self._skips: list[dict[str, Any]] = told["skip"]
        self.is_ci = is_ci

    def may_run_again(self, name: str) -> bool:
        """Whether it needs real processes, so that a busy machine may have failed it."""
        file = name.partition("::")[0]
        return _matches(file, self._processes) and not _matches(file, self._pure)

    def may_skip(self, name: str, reason: str) -> bool:
        """Whether the file has this skip, and CI, where it is one, may do without the test."""
        return any(
            name.startswith(skip["tests"])
            and skip["reason"] in reason
            and (not self.is_ci or (skip["in_ci"] and not _is_found(skip.get("without", ""))))
            for skip in self._skips
        )


def main() -> int:
    """Run, run again, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="that run tests side by side")
    parser.add_argument("--long", action="store_true", help="tests that CI does not run, too")
    asked, arguments = parser.parse_known_args()
    if asked.long:
        os.environ["HYPOTHESIS_PROFILE"] = "long"  # tests.support.examples reads it
    else:
        arguments = ["-m", "not long", *arguments]
    forgiven = Forgiven(FORGIVEN, is_ci=bool(os.environ.get(IN_CI)))

    first, status = _run([f"--numprocesses={asked.processes}", "--dist=worksteal", *arguments])
    problems = _problems(first, status, forgiven)
    again = [*filter(forgiven.may_run_again, first.failed), *first.lost]
    if len(again) > MAX_AGAIN:
        problems.append(f"{len(again)} tests to run again are more than bad luck ({MAX_AGAIN}):")
        problems += again
    elif not problems:
        problems += [f"not passed alone either: {name}" for name in again if not _passes(name)]
        for name in again:
            print(f"\n{'=' * 20} ran again, alone: {name}; the first time:")
            print(first.failed.get(name, "it never ran"))
    _show_seconds(first)
    print(
        f"{len(first.collected)} tests: {len(first.passed)} passed, {len(first.skipped)} skipped "
        f"(of modules, too), {len(first.failed)} failed, {len(first.lost)} never ran"
    )
    if problems:
        more = [f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else []
        print("FAILED", *problems[:MAX_LINES], *more, sep="\n  ")
    return 1 if problems else 0


def _run(arguments: Sequence[str]) -> tuple[Report, int]:
    """One run of pytest in workers, with its exit status."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.tools.runner.report",
            f"{OPTION}={path}",
        ]
        pytest_run = subprocess.Popen([*command, f"--max-worker-restart={MAX_DEATHS}", *arguments])
        try:
            status = pytest_run.wait()
        except KeyboardInterrupt:  # pytest has it, too, and ends its workers
            status = pytest_run.wait()
        if not path.exists():
            sys.exit(f"FAILED\n  pytest has ended with status {status} and no report")
        return Report(**json.loads(path.read_text())), status


def _problems(run: Report, status: int, forgiven: Forgiven) -> list[str]:
    """What no second run mends."""
    problems = [f"not collected: {name}" for name in run.uncollected]
    if not run.collected:
        problems.append("no test was collected")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        problems.append(f"pytest has ended with status {status}")
    if status == pytest.ExitCode.TESTS_FAILED and not (run.failed or run.lost):
        problems.append("pytest says that tests failed, and its report has none")
    problems += [
        f"failed, and needs no process: {name}"
        for name in run.failed
        if not forgiven.may_run_again(name)
    ]
    where = f"{FORGIVEN} does not allow it{' in CI' if forgiven.is_ci else ''}"
    problems += [
        f"skipped, and {where}: {name}: {reason}"
        for name, reason in run.skipped.items()
        if not forgiven.may_skip(name, reason)
    ]
    return problems


def _passes(name: str) -> bool:
    print(f"\nagain, alone: {name}", flush=True)
    run, _ = _run(["--numprocesses=1", name])
    return run.passed == [name]


def _show_seconds(run: Report) -> None:
    """Of each folder of tests, and of the slowest tests."""
    folders: defaultdict[str, float] = defaultdict(float)
    for name, seconds in run.seconds.items():
        folders["/".join(Path(name.partition("::")[0]).parts[:2])] += seconds
    for title, kinds, number in (
        ("by folder", folders, None),
        ("of the slowest tests", run.seconds, NUM_SLOWEST),
    ):
        print(f"\nseconds {title}, each with the fixtures that it made:")
        for name in sorted(kinds, key=lambda name: -kinds[name])[:number]:
            print(f"{kinds[name]:8.1f}  {name}")
    print()


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


def _is_found(needed: str) -> bool:
    """Whether a program or a Python package is here."""
    return bool(needed) and (shutil.which(needed) or find_spec(needed)) is not None


if __name__ == "__main__":
    sys.exit(main())
