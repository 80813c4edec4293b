"""The runner of `make test` ends with 0 only if no test was left out: planted in small suites."""

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.runner import FORGIVEN as FORGIVEN_FILE

ROOT = Path(__file__).parents[2]
PROCESS, PURE, MODULE = (f"tests/{name}/test_it.py" for name in ("processes", "pure", "module"))
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
skips = [
    { tests = "tests/processes/", reason = "no GPU", in_ci = true },
    { tests = "tests/processes/", reason = "needs promtool", in_ci = false },
    { tests = "tests/processes/", reason = "too old", in_ci = true, without = "sh" },
]
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
PASSES = "def test_it(): pass\n"
LONG = "@pytest.mark.long\ndef test_long(): pass\n"
NO_GPU = "def test_no_gpu(): pytest.skip('no GPU')\n"
FLAKE = "def test_a_flake(): assert not first_time(), 'the first time'\n"
FAILURES = """
@pytest.mark.parametrize("n", range(60))
def test_it(n): assert not "planted"
"""
SKIPS = """
@pytest.mark.parametrize("n", ["no GPU", "not today", "needs promtool", "this sh is too old"])
def test_it(n): pytest.skip(n)
"""
DEATHS = """
@pytest.mark.parametrize("n", range(5))
def test_a_library_aborts_the_first_time(n):
    if first_time(n):
        time.sleep(0.2)  # the controller may send something, and fails if it cannot
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


@dataclass(frozen=True)
class Suite:
    """Tests of a process, of pure code and of a module; how a run of them ends, and its output."""

    process: str
    status: int
    output: tuple[str, ...]
    pure: str = PASSES
    module: str = ""
    arguments: tuple[str, ...] = ()
    is_ci: bool = True


REFUSED = rf"skipped, and [^:]* does not allow it( in CI)?: {PROCESS}::test_it\[%s\]"
COUNTS = r"%d tests: %d passed, %d skipped \(of modules, too\), %d failed, %d never ran"
SUITES = {
    "green: a long test, a declared skip, a flake of processes": Suite(
        LONG + NO_GPU + FLAKE,
        0,
        (
            r"\d\.\d s in tests/processes\n",
            COUNTS % (3, 1, 1, 1, 0),
            f"ran again, alone: {PROCESS}::test_a_flake(?s:.*)AssertionError: the first time",
        ),
    ),
    "with the long test": Suite(LONG, 0, (COUNTS % (2, 2, 0, 0, 0),), arguments=("--long",)),
    "other skips in CI, of another folder, of a module": Suite(
        SKIPS,
        1,
        (
            *(REFUSED % one for one in ("not today", "needs promtool", "this sh is too old")),
            f"{PURE}::test_no_gpu: no GPU",
            f"in CI: {MODULE}: could not import",
        ),
        pure=NO_GPU,
        module='pytest.importorskip("no_such_module")',
    ),
    "other skips elsewhere": Suite(
        SKIPS, 1, (REFUSED % "not today", r"FAILED\n.*not today\n?\Z"), is_ci=False
    ),
    "a module that cannot be imported": Suite(
        PASSES, 1, (f"not collected: {MODULE}",), module="import no_such_module"
    ),
    "tests that never ran": Suite(
        FAILURES,
        1,
        (r"[1-9]\d* never ran", "60 tests to run again are more than bad luck"),
        pure="",
        arguments=("--exitfirst",),
    ),
    "a defect behind tests that end their worker, and a flake of pure code": Suite(
        DEATHS,
        1,
        (
            COUNTS % (106, 99, 0, 7, 0),
            "6 tests to run again are more than bad luck",
            f"failed, and needs no process: {PURE}::test_a_flake",
        ),
        pure=FLAKE,
    ),
    "hangs, each one failure": Suite(
        HANGS,
        1,
        (
            COUNTS % (54, 51, 0, 3, 0),
            "in test_one_keeps_the_interpreter_in_native_code",
            "(?s:.*not passed alone either){3}",
        ),
    ),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_green_or_red_with_its_reason(tmp_path: Path, name: str) -> None:
    suite = SUITES[name]
    tests = {PROCESS: suite.process, PURE: suite.pure, MODULE: suite.module}
    files = {name: HEAD + text for name, text in tests.items()}
    for path, text in {**files, "tests/forgiven.toml": FORGIVEN, "pytest.ini": CONFIG}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    # The worker of this test has variables that are not for theirs.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ours = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    ended = subprocess.run(
        [sys.executable, "-m", "tests.tools.runner", "--processes=2", *suite.arguments],
        cwd=tmp_path,
        env={**kept, **ours, "TESTS_IN_CI": "yes" * suite.is_ci},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert ended.returncode == suite.status, ended.stdout
    for words in suite.output:
        assert re.search(words, ended.stdout), ended.stdout


def test_each_pattern_of_what_is_forgiven_is_of_some_test() -> None:
    lists = tomllib.loads((ROOT / FORGIVEN_FILE).read_text())
    tests = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]

    patterns = [
        *lists["processes"],
        *lists["pure"],
        *(f"{one['tests']}*" for one in lists["skips"]),
    ]
    assert not [one for one in patterns if not fnmatch.filter(tests, one)]
