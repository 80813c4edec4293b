"""Runs of ``kvbus conform``, side by side: most of the time they wait for what does not happen."""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kvbus.cli import app

AT_ONCE = 12
ROLES = ("prefill", "decode")


class Play(NamedTuple):
    role: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status of a run, and its rules by name."""

    status: int
    rules: dict[str, dict[str, Any]]

    def seen(self, verdict: str) -> set[str]:
        return {name for name, rule in self.rules.items() if rule["verdict"] == verdict}


Run = Callable[[Sequence[Play]], list[Ended]]


def engine(name: str, line: str = "", flaw: str = "") -> tuple[str, ...]:
    """The command of an engine of this folder, with a ``flaw`` in place of one ``line``."""
    source = (Path(__file__).parent / f"{name}_engine.py").read_text()
    assert not line or source.count(line) == 1, line
    return sys.executable, "-c", source.replace(line, flaw) if line else source


def conform(play: Play) -> Ended:
    options = ["--role", play.role, "--json", *play.options]
    result = CliRunner().invoke(app, ["conform", *options, "--", *play.command])
    rules = {rule["name"]: rule for rule in json.loads(result.stdout)["rules"]}
    return Ended(result.exit_code, rules)


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Run these plays at once, in processes that have imported kvbus already."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kvbus.cli", "kvbus.conform.command"])
    with ProcessPoolExecutor(AT_ONCE, mp_context=processes) as pool:
        yield lambda plays: list(pool.map(conform, plays))
