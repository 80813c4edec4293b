"""A plugin of pytest: it writes what became of each test, and ends a process that hangs for good.

The timeout of a test is a signal, which native code that keeps the interpreter never sees. So a
thread without Python ends such a worker, half as long again after it began a phase of a test.
pytest-xdist then goes on in a new worker.
"""

import faulthandler
import json
from pathlib import Path
from typing import Any

import pytest

LIMIT = pytest.StashKey[float]()
HANGS_FOR_GOOD = 1.5
OPTION = "--report-file"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    worker = getattr(config, "workerinput", None)
    config.pluginmanager.register(
        Watchdog(_stacks(path, worker["workerid"])) if worker else Reporter(path)
    )


class Watchdog:
    """Writes the stacks of a worker as it dies, and ends it where it hangs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        faulthandler.enable(self._file)

    @pytest.hookimpl
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """The timeout of a test is known; pytest-timeout goes on and sets it."""
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
    def __init__(self, path: Path) -> None:
        self._path = path
        self._collected: set[str] = set()
        self._passed: set[str] = set()
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._uncollected: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """What a worker has found; if two of them differ, pytest-xdist reports an error."""
        self._collected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module is skipped as a whole, or cannot be imported."""
        if report.failed:
            self._uncollected[report.nodeid] = report.longreprtext
        elif report.skipped:
            self._skipped[report.nodeid] = _reason(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """A worker died: its stacks are what there is to see."""
        worker = report.node.gateway.id  # type: ignore[attr-defined,unused-ignore]
        stacks = _stacks(self._path, worker).read_text(errors="replace")
        report.longrepr = f"{report.longrepr}\n{stacks}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            shown = [report.longreprtext, *(f"[{name}]\n{text}" for name, text in report.sections)]
            before = self._failed.get(report.nodeid, "")
            self._failed[report.nodeid] = "\n".join([before, *shown]).strip()
        elif report.skipped:
            self._skipped[report.nodeid] = _reason(report)
        elif report.when == "teardown":
            self._passed.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        skipped = {name: why for name, why in self._skipped.items() if name not in self._failed}
        report = {
            "collected": sorted(self._collected),
            "passed": sorted(self._passed - self._failed.keys() - skipped.keys()),
            "skipped": skipped,
            "failed": self._failed,
            "uncollected": self._uncollected,
            "seconds": self._seconds,
        }
        self._path.write_text(json.dumps(report))


def _stacks(report: Path, worker: str) -> Path:
    return report.with_suffix(f".{worker}")


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why a test was skipped; one that is expected to fail is not skipped."""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else report.longrepr
    return str(text).removeprefix("Skipped: ")
