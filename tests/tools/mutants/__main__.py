"""Shows that tests see each mutant: ``python -m tests.tools.mutants``.

Each is applied to a copy of the tree, where each test that it names must fail. Without a mutant all
of them must pass. The exit status is 1 if they do not, or if too many mutants survive.
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
    mutant: Mutant
    is_killed: bool
    took_s: float

    def row(self) -> str:
        killed_by = f"{'' if self.is_killed else 'SURVIVES '}{', '.join(self.mutant.tests)}"
        return " | ".join((self.mutant.name, self.mutant.breaks, killed_by, f"{self.took_s:.1f}"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.tools.mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="this one; repeatable")
    parser.add_argument("--room", default="", metavar="PREFIX", help="with an edit below this path")
    parser.add_argument("--long", action="store_true", help="also tests that are marked long")
    wanted = parser.parse_args()
    chosen = [one for one in mutants() if _is_chosen(one, wanted)]
    if not chosen:
        parser.error("there is no such mutant")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        trees = [Tree(Path(folder) / str(number), long=wanted.long) for number in range(NUM_TREES)]
        results = _side_by_side(trees, chosen)
        if not trees[0].passes(sorted({name for mutant in chosen for name in mutant.tests})):
            sys.exit("their tests fail without any mutant, too")
    killed = sum(result.is_killed for result in results)
    print(f"{killed} of {len(results)} are killed: {killed / len(results):.0%}")
    sys.exit(killed < LEAST_KILLED * len(results))


def _is_chosen(mutant: Mutant, wanted: argparse.Namespace) -> bool:
    is_named = not wanted.only or mutant.name in wanted.only
    is_below = any(edit.file.startswith(wanted.room) for edit in mutant.edit)
    return is_named and is_below


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
    result = Result(mutant, is_seen, time.monotonic() - started)
    print(result.row(), flush=True)
    return result


if __name__ == "__main__":
    main()
