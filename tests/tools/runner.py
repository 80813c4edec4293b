"""Runs tests, and believes its report alone: ``python -m tests.tools.runner [pytest's options]``.

It ends with 0 only if each collected test has passed, or was skipped for a reason in
``tests/forgiven.toml``. A busy machine may fail a test of real processes, or end its worker: up to
`MAX_AGAIN` such tests run once more, alone. With ``TESTS_IN_CI`` set, few skips are forgiven.

Without ``--long``, tests marked ``long`` are left out; with it, each test has more examples.

As a plugin of pytest, this module writes that report, and ends a worker that hangs. A timeout is a
signal, which native code that keeps the interpreter never sees. A thread without Python then
ends the worker, half as long again after a phase began, and pytest-xdist starts another.
"""

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

FORGIVEN = Path("tests", "forgiven.toml")
IN_CI = "TESTS_IN_CI"
"""Not ``CI``, with which Hypothesis draws the same examples each time."""
MAX_AGAIN = 5
MAX_DEATHS = 20
"""Each worker that died has a successor, which collects all tests again, up to so many."""
MAX_LINES = 20
NUM_SLOWEST = 20
LIMIT = pytest.StashKey[float]()
HANGS_FOR_GOOD = 1.5
OPTION = "--report-file"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    path, worker = config.getoption(OPTION), getattr(config, "workerinput", None)
    plugin = Watchdog(_stacks(path, worker["workerid"])) if worker else Reporter(path)
    config.pluginmanager.register(plugin)


class Watchdog:
    """Writes the stacks of a worker as it dies, and ends it where it hangs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        faulthandler.enable(self._file)

    @pytest.hookimpl
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        item.stash[LIMIT] = settings.timeout * HANGS_FOR_GOOD
        self._watch(item)

    # pytest stops the watch when a test fails, so that each phase begins it again.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._watch(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._watch(item)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _watch(self, item: pytest.Item) -> None:
        if (limit := item.stash.get(LIMIT, None)) is not None:
            faulthandler.dump_traceback_later(limit, exit=True, file=self._file)


class Reporter:
    """Writes which tests were collected, and what became of each."""

    def __init__(self, path: Path) -> None:
        self._path, self._collected, self._seconds = path, set[str](), Counter[str]()
        self._ends: dict[str, dict[str, str]] = {
            kind: {} for kind in ("uncollected", "failed", "skipped", "passed")
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note what a worker has found; if two differ, pytest-xdist reports an error."""
        self._collected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that is skipped as a whole, or cannot be imported."""
        if report.failed:
            self._ends["uncollected"][report.nodeid] = report.longreprtext
        elif report.skipped:
            self._ends["skipped"][report.nodeid] = _reason(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """Show the stacks of a worker that died."""
        worker = report.node.gateway.id  # type: ignore[attr-defined,unused-ignore]
        stacks = _stacks(self._path, worker).read_text(errors="replace")
        report.longrepr = f"{report.longrepr}\n{stacks}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ends, name = self._ends, report.nodeid
        self._seconds["/".join(name.split("/")[:2])] += report.duration  # type: ignore[assignment]
        if report.failed:
            shown = [report.longreprtext, *(f"[{what}]\n{text}" for what, text in report.sections)]
            ends["failed"][name] = "\n".join([ends["failed"].get(name, ""), *shown]).strip()
        elif report.skipped:
            ends["skipped"][name] = _reason(report)
        elif report.when == "teardown":
            ends["passed"][name] = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        # A test that failed may have passed its teardown: the first of its ends counts.
        first, seen = dict[str, dict[str, str]](), set[str]()
        for kind, ends in self._ends.items():
            first[kind] = {name: why for name, why in ends.items() if name not in seen}
            seen.update(ends)
        lost = dict.fromkeys(sorted(self._collected - seen), "it never ran")
        more = {"lost": lost, "num_tests": len(self._collected), "seconds": self._seconds}
        self._path.write_text(json.dumps({**first, **more}))


def _stacks(report: Path, worker: str) -> Path:
    return report.with_suffix(f".{worker}")


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The reason of a skip; a test that is expected to fail is not skipped."""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else report.longrepr
    return str(text).removeprefix("Skipped: ")


class Forgiven:
    """Tests that may run again, and skips that are no failure."""

    def __init__(self, *, is_ci: bool) -> None:
        self._lists, self._is_ci = tomllib.loads(FORGIVEN.read_text()), is_ci

    def may_run_again(self, name: str) -> bool:
        file = name.partition("::")[0]
        needs_processes, is_pure = (
            any(fnmatch(file, pattern) for pattern in self._lists[key])
            for key in ("processes", "pure")
        )
        return needs_processes and not is_pure

    def may_skip(self, name: str, reason: str) -> bool:
        return any(
            name.startswith(skip["tests"])
            and skip["reason"] in reason
            and (not self._is_ci or (skip["in_ci"] and not _is_found(skip.get("without", ""))))
            for skip in self._lists["skips"]
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="that run tests side by side")
    parser.add_argument("--long", action="store_true", help="tests that CI does not run, too")
    wanted, arguments = parser.parse_known_args()
    if wanted.long:
        os.environ["HYPOTHESIS_PROFILE"] = "long"  # tests.support.examples reads it
    else:
        arguments = ["-m", "not long", *arguments]
    is_ci = bool(os.environ.get(IN_CI))
    forgiven = Forgiven(is_ci=is_ci)

    side_by_side = [f"--numprocesses={wanted.processes}", "--dist=worksteal"]
    run, status = _run([*side_by_side, f"--durations={NUM_SLOWEST}", *arguments])
    where = f"{FORGIVEN} does not allow it{' in CI' if is_ci else ''}"
    problems = [f"not collected: {name}" for name in run["uncollected"]]
    problems += ["no test was collected"] * (not run["num_tests"])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        problems.append(f"pytest has ended with status {status}")
    if status == pytest.ExitCode.TESTS_FAILED and not (run["failed"] or run["lost"]):
        problems.append("pytest reports failures, and its report has none")
    problems += [
        f"failed, and needs no process: {name}"
        for name in run["failed"]
        if not forgiven.may_run_again(name)
    ]
    problems += [
        f"skipped, and {where}: {name}: {reason}"
        for name, reason in run["skipped"].items()
        if not forgiven.may_skip(name, reason)
    ]
    again = [*filter(forgiven.may_run_again, run["failed"]), *run["lost"]]
    if len(again) > MAX_AGAIN:
        problems.append(f"{len(again)} tests to run again are more than bad luck ({MAX_AGAIN}):")
        problems += again
    elif not problems:
        problems += [f"not passed alone either: {name}" for name in again if not _passes(name)]
        for name in again:
            print(f"\n{'=' * 20} ran again, alone: {name}; the first time:")
            print(run["failed"].get(name, "it never ran"))
    for folder, seconds in sorted(run["seconds"].items()):
        print(f"{seconds:8.1f} s in {folder}")
    numbers = [len(run[kind]) for kind in ("passed", "skipped", "failed", "lost")]
    words = "{} passed, {} skipped (of modules, too), {} failed, {} never ran"
    print(f"{run['num_tests']} tests: {words.format(*numbers)}")
    if problems:
        more = [f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else []
        print("FAILED", *problems[:MAX_LINES], *more, sep="\n  ")
    return 1 if problems else 0


def _run(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run pytest in workers; return its report and its exit status."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.tools.runner", f"{OPTION}={path}"]
        pytest_run = subprocess.Popen([*command, f"--max-worker-restart={MAX_DEATHS}", *arguments])
        try:
            status = pytest_run.wait()
        except KeyboardInterrupt:  # pytest has it, too, and ends its workers
            status = pytest_run.wait()
        if not path.exists():
            sys.exit(f"FAILED\n  pytest has ended with status {status} and no report")
        return json.loads(path.read_text()), status


def _passes(name: str) -> bool:
    print(f"\nagain, alone: {name}", flush=True)
    run, _ = _run(["--numprocesses=1", name])
    return [*run["passed"]] == [name]


def _is_found(needed: str) -> bool:
    return bool(needed) and (shutil.which(needed) or find_spec(needed)) is not None


if __name__ == "__main__":
    sys.exit(main())
