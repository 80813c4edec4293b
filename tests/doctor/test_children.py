"""Probe processes: how their ends are told, that they are bounded, and that none is left behind."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.doctor.children import Budget, run_alone, run_pair

MODULE = "tests.doctor.processes.misbehaving"
PLENTY = 30.0
ENDS_WITHIN_MS = 30_000
PARENT = f"""
from kvbus.doctor.children import Budget, run_alone
run_alone("{MODULE}", "hang", env={{}}, budget=Budget(60, 60))
"""


def plenty() -> Budget:
    return Budget(PLENTY, PLENTY)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A pipe in which a process that hangs says its pid."""
    path = tmp_path / "told"
    os.mkfifo(path)
    return path


@pytest.fixture
def heard(told: Path) -> Iterator[int]:
    """The end of that pipe that is open all the time, so that nobody waits to say it."""
    fd = os.open(told, os.O_RDWR)
    yield fd
    os.close(fd)


def pid_in(heard: int) -> int:
    return int(os.read(heard, 100))


def has_ended(pid: int) -> bool:
    """Whether the process ends in time; one that is gone has."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = bool(poll.poll(ENDS_WITHIN_MS))
    os.close(fd)
    return ended


def test_a_pair_answers() -> None:
    ended = run_pair(MODULE, env={}, budget=plenty())

    assert (ended.output, ended.failure) == ("read a line\n", "")


def test_a_process_that_hangs_is_killed_when_its_time_is_over(told: Path, heard: int) -> None:
    budget = Budget(PLENTY, 3.0)  # long enough to start

    ended = run_alone(MODULE, "hang", env={"MISBEHAVE_AT": str(told)}, budget=budget)

    assert ended.failure == "no answer within 3 s; --timeout gives more"
    assert has_ended(pid_in(heard))


def test_a_crash_is_told_with_its_signal() -> None:
    ended = run_alone(MODULE, "crash", env={}, budget=plenty())

    assert ended.failure == "killed by SIGSEGV"


def test_a_failure_is_told_in_its_own_words() -> None:
    ended = run_alone(MODULE, "fail", env={}, budget=plenty())

    assert ended.failure == "it is broken"


def test_a_module_that_is_not_there_is_a_failure_too() -> None:
    ended = run_alone("kvbus.doctor.nothing", env={}, budget=plenty())

    assert "No module named kvbus.doctor.nothing" in ended.failure


def test_of_a_pair_the_target_that_failed_first_is_told() -> None:
    ended = run_pair(MODULE, env={"MISBEHAVE": "refuse"}, budget=plenty())

    assert ended.failure == "the target has no memory"


def test_of_a_pair_a_reader_that_hangs_is_told_whatever_its_target_says_of_its_end() -> None:
    ended = run_pair(MODULE, env={"MISBEHAVE": "complain"}, budget=Budget(PLENTY, 1.5))

    assert ended.failure == "no answer within 1.5 s; --timeout gives more"


def test_a_target_that_does_not_end_when_told_is_killed(told: Path, heard: int) -> None:
    env = {"MISBEHAVE": "stay", "MISBEHAVE_AT": str(told)}

    ended = run_pair(MODULE, env=env, budget=plenty())

    assert ended.failure == "the reader has no line"
    assert has_ended(pid_in(heard))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_with_its_parent(number: int, told: Path, heard: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, "MISBEHAVE_AT": str(told)},
        stderr=subprocess.DEVNULL,
    )
    child = pid_in(heard)

    parent.send_signal(number)

    assert parent.wait(PLENTY) != 0
    assert has_ended(child)


def test_a_budget_is_shared_and_never_nothing() -> None:
    assert Budget(20, 8).next_s() == 8
    assert Budget(5, 8).next_s() <= 5
    assert Budget(0, 8).next_s() > 0
