"""The runner of `make test` ends with 0 only if no test was left out: planted in small suites."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

ROOT = Path(__file__).parents[2]
PROCESS, PURE = "tests/processes/test_it.py", "tests/pure/test_it.py"
CONFIG = """
[pytest]
testpaths = tests
addopts = --import-mode=importlib -p no:cacheprovider -p xdist.plugin -p pytest_timeout
timeout = 60
timeout_method = signal
markers = long
"""
FORGIVEN = """
processes = ["tests/processes/*"]
pure = []
[[skip]]
tests = "tests/processes/"
reason = "no GPU"
in_ci = true
[[skip]]
tests = "tests/processes/"
reason = "needs promtool"
in_ci = false
[[skip]]
tests = "tests/processes/"
reason = "too old"
in_ci = true
without = "sh"
"""
HEAD = "import asyncio, ctypes, os, pathlib, pytest, time\nHERE = pathlib.Path(__file__).parent\n"
FLAKE = """
def test_a_flake():
    seen = HERE / "seen"
    was_seen = seen.exists()
    seen.touch()
    assert was_seen, "the first time"
"""


class Ended(NamedTuple):
    """A run of the runner."""

    status: int
    output: str


class Run(Protocol):
    """Runs these files as a suite, with some arguments."""

    def __call__(self, files: Mapping[str, str], *arguments: str) -> Ended: ...


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """In CI, two tests side by side, without the plugins that take long to import."""

    monkeypatch.setenv("TESTS_IN_CI", "true")

    def run_suite(files: Mapping[str, str], *arguments: str) -> Ended:
        (tmp_path / "pytest.ini").write_text(CONFIG)
        for name, text in {**files, "tests/forgiven.toml": FORGIVEN}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(HEAD + text if path.suffix == ".py" else text)
        # The environment of a worker of these tests is not theirs.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        ours = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.runner", "--processes=2", *arguments],
            cwd=tmp_path,
            env={**kept, **ours},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout)

    return run_suite


def test_a_suite_that_passes_is_green(run: Run) -> None:
    ended = run({PROCESS: "def test_it(): pass", PURE: "def test_it(): pass"})

    assert ended.status == 0, ended.output
    assert "2 tests: 2 passed, 0 skipped" in ended.output


def test_a_defect_behind_twelve_tests_that_kill_their_worker_the_first_time_is_red(
    run: Run, tmp_path: Path
) -> None:
    ended = run(
        {
            PROCESS: """
@pytest.mark.parametrize("n", range(12))
def test_a_library_aborts_the_first_time(n):
    seen = HERE / f"seen-{n}"
    if not seen.exists():
        seen.touch()
        os._exit(1)

@pytest.mark.parametrize("n", range(100))
def test_a_defect(n):
    (HERE / f"ran-{n}").touch()
    assert n != 10, "planted"
"""
        }
    )

    assert ended.status == 1
    assert len(list(tmp_path.glob("tests/processes/ran-*"))) == 100
    assert "112 tests: 99 passed, 0 skipped (of modules, too), 13 failed" in ended.output
    assert "13 tests to run again are more than bad luck" in ended.output


def test_tests_that_never_ran_are_red(run: Run) -> None:
    ended = run(
        {
            PROCESS: """
@pytest.mark.parametrize("n", range(60))
def test_it(n):
    assert not "planted"
"""
        },
        "--exitfirst",
    )

    assert ended.status == 1
    assert "failed, 0 never ran" not in ended.output
    assert "60 tests to run again are more than bad luck" in ended.output


def test_a_hang_is_one_failure_and_all_others_run(run: Run) -> None:
    ended = run(
        {
            PROCESS: """
@pytest.mark.timeout(1)
def test_one_waits():
    asyncio.run(asyncio.sleep(3600))

@pytest.mark.timeout(1)
def test_one_keeps_the_interpreter_in_native_code():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

@pytest.fixture
def hangs_at_the_end():
    yield
    time.sleep(3600)

@pytest.mark.timeout(1)
def test_one_fails_and_then_hangs_at_its_end(hangs_at_the_end):
    assert not "planted"

@pytest.mark.parametrize("n", range(50))
def test_another(n):
    pass
"""
        }
    )

    assert ended.status == 1
    assert "53 tests: 50 passed, 0 skipped (of modules, too), 3 failed, 0 never ran" in ended.output
    assert "in test_one_keeps_the_interpreter_in_native_code" in ended.output
    assert ended.output.count("not passed alone either") == 3


def test_a_flake_of_processes_runs_again_and_its_first_output_is_shown(run: Run) -> None:
    ended = run({PROCESS: FLAKE})

    assert ended.status == 0, ended.output
    shown = ended.output.rpartition(f"ran again, alone: {PROCESS}::test_a_flake")[2]
    assert "AssertionError: the first time" in shown


def test_a_flake_of_pure_code_is_red(run: Run) -> None:
    ended = run({PURE: FLAKE})

    assert ended.status == 1
    assert f"failed, and needs no process: {PURE}::test_a_flake" in ended.output


def test_six_flakes_are_red(run: Run) -> None:
    ended = run(
        {
            PROCESS: """
@pytest.mark.parametrize("n", range(6))
def test_a_flake(n):
    seen = HERE / f"seen-{n}"
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""
        }
    )

    assert ended.status == 1
    assert "6 tests to run again are more than bad luck" in ended.output


def test_a_skip_that_is_declared_is_green(run: Run) -> None:
    ended = run({PROCESS: 'def test_it(): pytest.skip("no GPU")', PURE: "def test_it(): pass"})

    assert ended.status == 0, ended.output
    assert "2 tests: 1 passed, 1 skipped" in ended.output


@pytest.mark.parametrize(
    ("is_ci", "refused"),
    [
        ("true", ["elsewhere", "undeclared", "a missing tool", "an old tool"]),
        ("", ["elsewhere", "undeclared"]),
    ],
)
def test_another_skip_is_red(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_ci: str, refused: list[str]
) -> None:
    monkeypatch.setenv("TESTS_IN_CI", is_ci)
    reasons = {
        "declared": "no GPU",
        "undeclared": "not today",
        "a missing tool": "needs promtool",
        "an old tool": "this sh is too old",
    }
    ended = run(
        {
            PROCESS: f"""
@pytest.mark.parametrize("reason", {list(reasons.values())}, ids={list(reasons)})
def test_it(reason):
    pytest.skip(reason)
""",
            PURE: """
@pytest.mark.parametrize("n", [1], ids=["elsewhere"])
def test_it(n):
    pytest.skip("no GPU")
""",
        }
    )

    assert ended.status == 1
    lines = [line for line in ended.output.splitlines() if "does not allow it" in line]
    assert sorted(name for name in [*reasons, "elsewhere"] if f"[{name}]" in "".join(lines)) == (
        sorted(refused)
    )
    assert len(lines) == len(refused)


def test_a_module_that_is_skipped_or_cannot_be_imported_is_red(run: Run) -> None:
    skipped = run({PROCESS: 'pytest.importorskip("no_such_module")', PURE: "def test_it(): pass"})
    broken = run({PROCESS: "import no_such_module", PURE: "def test_it(): pass"})

    assert skipped.status == broken.status == 1
    assert f"in CI: {PROCESS}: could not import 'no_such_module'" in skipped.output
    assert f"not collected: {PROCESS}" in broken.output


def test_a_long_test_runs_when_it_is_asked_for(run: Run) -> None:
    files = {PURE: "def test_it(): pass", PROCESS: "@pytest.mark.long\ndef test_it(): pass"}

    short, long = run(files), run(files, "--long")

    assert (short.status, long.status) == (0, 0)
    assert "1 tests: 1 passed" in short.output
    assert "2 tests: 2 passed" in long.output


def test_the_seconds_of_folders_and_of_the_slowest_tests_are_shown(run: Run) -> None:
    slow = """
@pytest.fixture
def fixture(): time.sleep(1)
def test_it(fixture): time.sleep(1)
"""
    ended = run({PROCESS: slow, PURE: "def test_it(): pass"})

    shown = [line.split() for line in ended.output.splitlines() if line.startswith("   ")]
    assert [name for _, name in shown] == [
        "tests/processes",
        "tests/pure",
        f"{PROCESS}::test_it",
        f"{PURE}::test_it",
    ]
    assert all(float(shown[number][0]) >= 2 for number in (0, 2))
