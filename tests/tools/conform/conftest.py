"""Runs of ``kvbus conform``, side by side: most of the time they wait for what does not happen."""

import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kvbus.cli import app

AT_ONCE = 12
ROLES = ("prefill", "decode")


class Play(NamedTuple):
    """One run: the role and the command of an engine, and options."""

    role: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status of a run, and its rules by name."""

    status: int
    rules: dict[str, dict[str, Any]]

    def seen(self, verdict: str) -> dict[str, list[str]]:
        """The rules of which this came, and what was seen of each."""
        return {n: rule["seen"] for n, rule in self.rules.items() if rule["verdict"] == verdict}


def raw_engine(*words: str) -> tuple[str, ...]:
    """The command of an engine on bare sockets, with one flaw or none (""), and its allocator."""
    return sys.executable, "-m", "tests.tools.conform.raw_engine", *words


def conform(play: Play) -> Ended:
    """Run the command to its end."""
    options = ["--role", play.role, "--json", *play.options]
    result = CliRunner().invoke(app, ["conform", *options, "--", *play.command])
    rules = {rule["name"]: rule for rule in json.loads(result.stdout)["rules"]}
    return Ended(result.exit_code, rules)


class Plays:
    """Plays each once, and looks ahead: with one that is waited for begin those that follow it."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._begun: dict[Play, Future[Ended]] = {}

    def ended(self, plays: Sequence[Play], number: int) -> Ended:
        """What came of this one of the plays."""
        for play in plays[number : number + AT_ONCE]:
            if play not in self._begun:
                self._begun[play] = self._pool.submit(conform, play)
        return self._begun[plays[number]].result()


@pytest.fixture(scope="session")
def plays() -> Iterator[Plays]:
    """Plays in processes that have kvbus already; what nobody waits for any more is not begun."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kvbus.cli", "kvbus.conform.command"])
    pool = ProcessPoolExecutor(AT_ONCE, mp_context=processes)
    try:
        yield Plays(pool)
    finally:
        pool.shutdown(cancel_futures=True)
