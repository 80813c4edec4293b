"""Shows that tests and chaos see each mutant: ``python -m tests.mutants``; 1 if one survives.

Each is applied to a copy of the tree. The tests that are named must pass without any mutant.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant, mutants

GIT = shutil.which("git") or "git"
KERNEL = "kvbus/memory/copy_runs.so"
TEST_WITHIN_S, CHAOS_WITHIN_S = 300, 400
FAILED = 1
CHAOS_MINUTES = 1.0
SEEDS = (7, 8)
"""A mutant that needs luck has two chances."""


def main() -> None:
    """Run, print a table, and end with 1 when a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="the name of a mutant; all without")
    parser.add_argument("--no-chaos", action="store_true", help="only the tests")
    asked = parser.parse_args()
    chosen = [one for one in mutants() if not asked.only or one.name in asked.only]
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        tree = Path(folder) / "tree"
        _copy_tree(tree)
        rows = [_row(tree, mutant, chaos=not asked.no_chaos) for mutant in chosen]
        if not _tests_pass(tree, [name for mutant in chosen for name in mutant.tests]):
            rows.append(("no mutant at all", "the tests fail", ""))
    for row in rows:
        print(" | ".join(row))
    sys.exit(any("survives" in cell or "fail" in row[1][4:] for row in rows for cell in row))


def _row(tree: Path, mutant: Mutant, *, chaos: bool) -> tuple[str, str, str]:
    original = (tree / mutant.file).read_text(encoding="utf-8")
    (tree / mutant.file).write_text(mutant.changed(tree), encoding="utf-8")
    try:
        by_test = _by_test(tree, mutant.test)
        if mutant.in_place_of_chaos:
            by_chaos = f"another test: {_by_test(tree, mutant.in_place_of_chaos)}"
        else:
            by_chaos = f"chaos: {_chaos(tree)}" if chaos else "chaos: not run"
    finally:
        (tree / mutant.file).write_text(original, encoding="utf-8")
    row = mutant.name, f"test: {by_test}", by_chaos
    print(" | ".join(row), file=sys.stderr, flush=True)
    return row


def _by_test(tree: Path, name: str) -> str:
    return "survives" if _tests_pass(tree, [name]) else "seen"


def _copy_tree(tree: Path) -> None:
    """What git knows, or would take, and the compiled kernel."""
    listed = subprocess.run(
        [GIT, "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in [*listed.stdout.splitlines(), KERNEL]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _environment(tree: Path) -> dict[str, str]:
    """The copy's code comes first, for all processes that are started."""
    paths = (tree, tree / "services/decode", tree / "services/prefill")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _tests_pass(tree: Path, names: Sequence[str]) -> bool:
    """Whether they all pass; raises `RuntimeError` when they could not be run."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        timeout=TEST_WITHIN_S,
        check=False,
    )
    if ended.returncode not in (0, FAILED):
        raise RuntimeError(f"pytest could not run {names}:\n{ended.stdout}{ended.stderr}")
    return ended.returncode == 0


def _chaos(tree: Path) -> str:
    """What a run found first, and when."""
    for seed in SEEDS:
        command = ["--seed", str(seed), "--minutes", str(CHAOS_MINUTES), "--stop-at-first"]
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "tests.chaos", *command],
            cwd=tree,
            env=_environment(tree),
            capture_output=True,
            text=True,
            timeout=CHAOS_WITHIN_S,
            check=False,
        )
        if not ended.stdout:
            raise RuntimeError(f"chaos could not run:\n{ended.stderr}")
        if found := json.loads(ended.stdout)["violations"]:
            took_s = time.monotonic() - started
            return f"{found[0]['what']} after {found[0]['at_s']:.0f} of {took_s:.0f} s"
    return "survives"


if __name__ == "__main__":
    main()
