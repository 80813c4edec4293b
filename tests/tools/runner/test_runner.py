"""The runner of `make test` ends with 0 only if no test was left out: planted in small suites."""

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.runner.__main__ import FORGIVEN as FORGIVEN_FILE

ROOT = Path(__file__).parents[3]
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
HEAD = """
import asyncio, ctypes, os, pathlib, pytest, time
HERE = pathlib.Path(__file__).parent
def first_time(n=0):
    seen = HERE / f"seen-{n}"
    was_seen = seen.exists()
    seen.touch()
    return not was_seen
"""
PASSES = "def test_it(): pass"
FLAKE = "def test_a_flake(): assert not first_time(), 'the first time'"
FAILURES = """
@pytest.mark.parametrize("n", range(60))
def test_it(n): assert not "planted"
"""
SKIPS = """
@pytest.mark.parametrize("n", ["no GPU", "not today", "needs promtool", "this sh is too old"])
def test_it(n): pytest.skip(n)
"""
DEATHS = """
@pytest.mark.parametrize("n", range(12))
def test_a_library_aborts_the_first_time(n):
    if first_time(n):
        os._exit(1)

@pytest.mark.parametrize("n", range(100))
def test_a_defect(n): assert n != 10, "planted"
"""
HANGS = """
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
def test_another(n): pass
"""
SLOW = """
@pytest.fixture
def fixture(): time.sleep(1)
def test_it(fixture): time.sleep(1)
"""


@dataclass(frozen=True)
class Suite:
    """Tests of a process and of pure code; how a run of them must end, and what it must say."""

    process: str
    status: int
    says: str | tuple[str, ...]
    pure: str = ""
    arguments: tuple[str, ...] = ()
    is_ci: bool = True


REFUSED = rf"skipped, and [^:]* does not allow it( in CI)?: {PROCESS}::test_it\[%s\]"
TWO_OR_MORE = r"(?:[2-9]|\d{2,})\.\d"
SUITES = {
    "a long test": Suite(f"@pytest.mark.long\n{PASSES}", 0, "1 tests: 1 passed", pure=PASSES),
    "a long test that is asked for": Suite(
        f"@pytest.mark.long\n{PASSES}", 0, "1 tests: 1 passed", arguments=("--long",)
    ),
    "a declared skip": Suite(
        'def test_it(): pytest.skip("no GPU")', 0, "2 tests: 1 passed, 1 skipped", pure=PASSES
    ),
    "other skips in CI": Suite(
        SKIPS,
        1,
        tuple(REFUSED % one for one in ("not today", "needs promtool", "this sh is too old")),
    ),
    "other skips elsewhere": Suite(
        SKIPS, 1, (REFUSED % "not today", r"FAILED\n.*not today\n?\Z"), is_ci=False
    ),
    "a skip of another folder": Suite(
        PASSES, 1, f"{PURE}::test_it: no GPU", pure='def test_it(): pytest.skip("no GPU")'
    ),
    "a module that is skipped": Suite(
        'pytest.importorskip("no_such_module")', 1, f"in CI: {PROCESS}: could not import"
    ),
    "a module that cannot be imported": Suite(
        "import no_such_module", 1, f"not collected: {PROCESS}", pure=PASSES
    ),
    "tests that never ran": Suite(
        FAILURES,
        1,
        (r"[1-9]\d* never ran", "60 tests to run again are more than bad luck"),
        arguments=("--exitfirst",),
    ),
    "a flake of processes, shown": Suite(
        FLAKE,
        0,
        f"ran again, alone: {PROCESS}::test_a_flake(?s:.*)AssertionError: the first time",
    ),
    "a flake of pure code": Suite(
        PASSES, 1, f"failed, and needs no process: {PURE}::test_a_flake", pure=FLAKE
    ),
    "a defect behind tests that kill their worker": Suite(
        DEATHS,
        1,
        (
            r"112 tests: 99 passed, 0 skipped \(of modules, too\), 13 failed, 0 never ran",
            "13 tests to run again are more than bad luck",
        ),
    ),
    "hangs, each one failure": Suite(
        HANGS,
        1,
        (
            r"53 tests: 50 passed, 0 skipped \(of modules, too\), 3 failed, 0 never ran",
            "in test_one_keeps_the_interpreter_in_native_code",
            "(?s:.*not passed alone either){3}",
        ),
    ),
    "seconds of folders and of the slowest tests": Suite(
        SLOW,
        0,
        (
            rf"by folder.*\n +{TWO_OR_MORE}  tests/processes\n +[\d.]+  tests/pure\n",
            rf"slowest tests.*\n +{TWO_OR_MORE}  {PROCESS}::test_it\n +[\d.]+  {PURE}::test_it\n",
        ),
        pure=PASSES,
    ),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_green_or_red_and_says_why(tmp_path: Path, name: str) -> None:
    suite = SUITES[name]
    files = {PROCESS: HEAD + suite.process, PURE: HEAD + suite.pure}

    ended = run(tmp_path, files, *suite.arguments, is_ci=suite.is_ci)

    assert ended.returncode == suite.status, ended.stdout
    for words in (suite.says,) if isinstance(suite.says, str) else suite.says:
        assert re.search(words, ended.stdout), ended.stdout


def run(
    folder: Path, files: Mapping[str, str], *arguments: str, is_ci: bool
) -> "subprocess.CompletedProcess[str]":
    """Two tests side by side, without the plugins that take long to import."""
    all_files = {**files, "tests/forgiven.toml": FORGIVEN, "pytest.ini": CONFIG}
    for name, text in all_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # The environment of a worker of these tests is not theirs.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ours = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tests.tools.runner", "--processes=2", *arguments],
        cwd=folder,
        env={**kept, **ours, "TESTS_IN_CI": "yes" * is_ci},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def test_each_pattern_of_what_is_forgiven_is_of_some_test() -> None:
    told = tomllib.loads((ROOT / FORGIVEN_FILE).read_text())
    tests = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]

    patterns = [*told["processes"], *told["pure"], *(f"{one['tests']}*" for one in told["skip"])]
    assert not [one for one in patterns if not fnmatch.filter(tests, one)]
