"""Shows that tests see each mutant: ``python -m tests.tools.mutants``.

Each is applied to a copy of the tree, where each of the tests that it names must fail; without any
mutant all of them must pass. Ends with 1 when they do not, or when too many mutants survive.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.tools.mutants.mutant import Mutant, mutants
from tests.tools.mutants.tree import Tree

NUM_TREES = 2
LEAST_KILLED = 0.95


@dataclass(frozen=True)
class Result:
    """What became of a mutant; ``killed_by`` is empty when it survived."""

    mutant: Mutant
    killed_by: str
    took_s: float

    def row(self) -> str:
        killed_by = self.killed_by or "SURVIVES " + ", ".join(self.mutant.tests)
        cells = self.mutant.name, self.mutant.breaks, killed_by, f"{self.took_s:.1f}"
        return " | ".join(cells)


def main() -> None:
    """Run, print a table, and end with 1 when too many survived."""
    parser = argparse.ArgumentParser(prog="tests.tools.mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; repeatable")
    parser.add_argument("--room", default="", metavar="PREFIX", help="with an edit below this path")
    parser.add_argument("--long", action="store_true", help="also tests that are marked long")
    parser.add_argument("--chaos", action="store_true", help="a chaos run in place of the tests")
    asked = parser.parse_args()
    chosen = [one for one in mutants() if _is_chosen(one, asked)]
    if not chosen:
        parser.error("there is no such mutant")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        trees = [Tree(Path(folder) / str(number), long=asked.long) for number in range(NUM_TREES)]
        if asked.chaos:
            results = [_by_chaos(trees[0], mutant) for mutant in chosen]
        else:
            results = _side_by_side(trees, chosen)
            _check_without_any(trees[0], chosen)
    killed = sum(bool(result.killed_by) for result in results)
    print(f"{killed} of {len(results)} are killed: {killed / len(results):.0%}")
    sys.exit(killed < LEAST_KILLED * len(results))


def _is_chosen(mutant: Mutant, asked: argparse.Namespace) -> bool:
    is_named = not asked.only or mutant.name in asked.only
    is_below = any(edit.file.startswith(asked.room) for edit in mutant.edit)
    return is_named and is_below and (mutant.chaos or not asked.chaos)


def _side_by_side(trees: Sequence[Tree], chosen: Sequence[Mutant]) -> list[Result]:
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def run(mutant: Mutant) -> Result:
        tree = free.get()
        try:
            return _by_tests(tree, mutant)
        finally:
            free.put(tree)

    print("mutant | breaks | killed by | seconds", flush=True)
    with ThreadPoolExecutor(len(trees)) as threads:
        return list(threads.map(run, chosen))


def _by_tests(tree: Tree, mutant: Mutant) -> Result:
    """All that it names see it, or it survives."""
    started = time.monotonic()
    try:
        with tree.mutated(mutant):
            is_seen = all(not tree.passes([name]) for name in mutant.tests)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr, flush=True)
        is_seen = False
    killed_by = ", ".join(mutant.tests) if is_seen else ""
    return _told(Result(mutant, killed_by, time.monotonic() - started))


def _by_chaos(tree: Tree, mutant: Mutant) -> Result:
    started = time.monotonic()
    with tree.mutated(mutant):
        found = tree.chaos()
    return _told(Result(mutant, found, time.monotonic() - started))


def _told(result: Result) -> Result:
    print(result.row(), flush=True)
    return result


def _check_without_any(tree: Tree, chosen: Sequence[Mutant]) -> None:
    if not tree.passes(sorted({name for mutant in chosen for name in mutant.tests})):
        sys.exit("their tests fail without any mutant, too")


if __name__ == "__main__":
    main()
