"""The runner of `make test` ends with 0 only if no test was left out: planted in small suites."""

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from tests.runner.__main__ import FORGIVEN as FORGIVEN_FILE

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


PASSES = "def test_it(): pass"
SIX_FLAKES = """
@pytest.mark.parametrize("n", range(6))
def test_a_flake(n):
    seen = HERE / f"seen-{n}"
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""
SIXTY_FAIL = """
@pytest.mark.parametrize("n", range(60))
def test_it(n):
    assert not "planted"
"""


class Suite(NamedTuple):
    """Some files, how a run of them must end, and what it must have said, as a pattern."""

    files: Mapping[str, str]
    status: int
    says: str
    arguments: tuple[str, ...] = ()


LONG = {PURE: PASSES, PROCESS: f"@pytest.mark.long\n{PASSES}"}
SUITES = {
    "all pass": Suite({PROCESS: PASSES, PURE: PASSES}, 0, "2 tests: 2 passed, 0 skipped"),
    "a long test": Suite(LONG, 0, "1 tests: 1 passed"),
    "a long test that is asked for": Suite(LONG, 0, "2 tests: 2 passed", ("--long",)),
    "a declared skip": Suite(
        {PROCESS: 'def test_it(): pytest.skip("no GPU")', PURE: PASSES},
        0,
        "2 tests: 1 passed, 1 skipped",
    ),
    "a module that is skipped": Suite(
        {PROCESS: 'pytest.importorskip("no_such_module")', PURE: PASSES},
        1,
        f"in CI: {PROCESS}: could not import 'no_such_module'",
    ),
    "a module that cannot be imported": Suite(
        {PROCESS: "import no_such_module", PURE: PASSES}, 1, f"not collected: {PROCESS}"
    ),
    "tests that never ran": Suite(
        {PROCESS: SIXTY_FAIL},
        1,
        r"[1-9]\d* never ran(?s:.*)60 tests to run again are more than bad luck",
        ("--exitfirst",),
    ),
    "a flake of processes, shown": Suite(
        {PROCESS: FLAKE},
        0,
        f"ran again, alone: {PROCESS}::test_a_flake(?s:.*)AssertionError: the first time",
    ),
    "a flake of pure code": Suite(
        {PURE: FLAKE}, 1, f"failed, and needs no process: {PURE}::test_a_flake"
    ),
    "six flakes": Suite({PROCESS: SIX_FLAKES}, 1, "6 tests to run again are more than bad luck"),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_green_or_red_and_says_why(run: Run, name: str) -> None:
    suite = SUITES[name]

    ended = run(suite.files, *suite.arguments)

    assert ended.status == suite.status, ended.output
    assert re.search(suite.says, ended.output), ended.output


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


def test_each_pattern_of_what_is_forgiven_is_of_some_test() -> None:
    told = tomllib.loads((ROOT / FORGIVEN_FILE).read_text())
    tests = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]

    patterns = [*told["processes"], *told["pure"], *(f"{one['tests']}*" for one in told["skip"])]
    assert not [one for one in patterns if not fnmatch.filter(tests, one)]
