"""`kvbus demo` as its users run it: a process of its own, seen from outside."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.agents import wait_until

ENDS_WITHIN_S = 100.0
MID_RUN_WITHIN_S = 90.0
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
"""What a process finds that nobody gave a locale."""


@dataclass
class RunningDemo:
    """One run, its temporary files below ``folder``."""

    process: subprocess.Popen[str]
    folder: Path

    def children(self) -> dict[int, str]:
        """The command lines of its child processes, by pid."""
        children = psutil.Process(self.process.pid).children()
        return {one.pid: " ".join(one.cmdline()) for one in children}

    def wait_mid_run(self) -> dict[int, str]:
        """Return its four child processes once so many handoffs completed that requests ended."""

        def num_completed() -> int:
            logs = self.folder.glob("*/decode-agent.log")
            return sum(log.read_text().count("handoff.completed") for log in logs)

        wait_until(lambda: num_completed() > 8, "handoffs", MID_RUN_WITHIN_S)
        return self.children()

    def end(self) -> tuple[int, str, str]:
        """Its exit status, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=ENDS_WITHIN_S)
        return self.process.returncode, stdout, stderr

    def left_files(self) -> list[Path]:
        """What is left in its temporary folder."""
        return list(self.folder.iterdir())


class Demo:
    """Starts runs; each ends with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[RunningDemo] = []

    def start(self, *arguments: str) -> RunningDemo:
        command = [sys.executable, "-c", "from kvbus.cli import app; app()", "demo", *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(self._folder), "COLUMNS": "80", **ASCII},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(RunningDemo(process, self._folder))
        return self.running[-1]

    def run(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Exit status, the object of ``--json``, and what stands above it."""
        status, stdout, stderr = self.start("--json", *arguments).end()
        *above, last = stdout.splitlines() or [stderr]
        return status, json.loads(last), "\n".join(above)


@pytest.fixture
def demo() -> Iterator[Demo]:
    """Runs of the demo, in a folder of a short name, as sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        demo = Demo(Path(folder))
        yield demo
        for one in demo.running:
            with one.process as process:
                process.kill()
