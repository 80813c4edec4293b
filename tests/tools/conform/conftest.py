"""Runs of ``kvbus conform``, side by side: most of the time they wait for what does not happen."""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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


def raw_engine(flaw: str = "") -> tuple[str, ...]:
    return sys.executable, "-m", "tests.tools.conform.raw_engine", flaw


def sdk_engine(flaw: str = "") -> tuple[str, ...]:
    return sys.executable, "-m", "tests.tools.conform.sdk_engine", flaw


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
