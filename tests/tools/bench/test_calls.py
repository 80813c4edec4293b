"""The Python calls of one handoff, which are most of what a small one costs its agents."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).parents[3]
MOST = {"mapped agent": 275, "prefill agent": 84}
"""In each agent, for a mapped fetch of one block on a warm route."""

LEAST_FILES = 20
"""That a reader follows: without those of the services there are 13."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose folder is called as one of its packages."""
    for name in ("kvbus", "services", "benchmarks"):
        shutil.copytree(TREE / name, tmp_path / "kvbus" / name)
    return tmp_path / "kvbus"


def test_mapped_fetch_of_one_block_takes_few_calls_in_each_agent(clone: Path) -> None:
    paths = [clone, clone / "services/prefill", clone / "services/decode"]
    ended = subprocess.run(
        [sys.executable, clone / "benchmarks/count_calls.py", "--rounds", "5", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    # On a busy machine a fetch that takes long acquires, too: the best of the rounds counts.
    found = json.loads(ended.stdout)["mapped fetch"]
    calls = found["fewest_by_process"]
    assert {name: calls[name] for name in MOST if calls[name] > MOST[name]} == {}
    assert all(calls[name] > 10 for name in MOST), "they were counted"
    assert found["files"] > LEAST_FILES
