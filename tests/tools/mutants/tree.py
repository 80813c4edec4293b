"""A copy of the source tree, whose code is changed and tested while the original stays."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.tools.mutants.mutant import ROOT, Mutant

GIT = shutil.which("git") or "git"
KERNEL = "kvbus/memory/copy_runs.so"
PYTHON_OF_VLLM = str(ROOT / ".venv-vllm/bin/python")
TEST_WITHIN_S, CHAOS_WITHIN_S = 300, 400
CHAOS_MINUTES = 1.0
SEEDS = (7, 8)
"""A mutant that needs luck has two chances."""
PASSED, FAILED = 0, 1


class Tree:
    """What git knows, or would take, and the compiled kernel, below ``folder``."""

    def __init__(self, folder: Path, *, long: bool) -> None:
        self._folder = folder
        self._chosen = [] if long else ["-m", "not long"]
        listing = [GIT, "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in [*listed.stdout.splitlines(), KERNEL]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The tree has the mutant meanwhile."""
        changed = mutant.changed(self._folder)
        originals = {file: (self._folder / file).read_text(encoding="utf-8") for file in changed}
        try:
            self._write(changed)
            yield
        finally:
            self._write(originals)

    def _write(self, texts: Mapping[str, str]) -> None:
        for file, text in texts.items():
            (self._folder / file).write_text(text, encoding="utf-8")

    def passes(self, names: Sequence[str]) -> bool:
        """Whether all of these tests pass; raises `RuntimeError` when they could not be run."""
        of_vllm = [name for name in names if name.startswith("tests/e2e/vllm/")]
        others = [name for name in names if name not in of_vllm]
        return all(
            self._pass(some, python)
            for some, python in ((others, sys.executable), (of_vllm, PYTHON_OF_VLLM))
            if some
        )

    def _pass(self, names: Sequence[str], python: str) -> bool:
        options = ["-q", "-x", "-p", "no:cacheprovider", *self._chosen]
        within_s = TEST_WITHIN_S * len(names)
        ended = self._run(["pytest", *options, *names], within_s=within_s, python=python)
        if ended.returncode not in (PASSED, FAILED):
            raise RuntimeError(f"pytest could not run {names}:\n{ended.stdout}{ended.stderr}")
        return ended.returncode == PASSED

    def chaos(self) -> str:
        """What a chaos run found first, and when; empty when it found nothing."""
        for seed in SEEDS:
            started = time.monotonic()
            command = ["--seed", str(seed), "--minutes", str(CHAOS_MINUTES), "--stop-at-first"]
            ended = self._run(["tests.tools.chaos", *command], within_s=CHAOS_WITHIN_S)
            if not ended.stdout:
                raise RuntimeError(f"chaos could not run:\n{ended.stderr}")
            if found := json.loads(ended.stdout)["violations"]:
                took_s = time.monotonic() - started
                return f"{found[0]['what']} after {found[0]['at_s']:.0f} of {took_s:.0f} s"
        return ""

    def _run(
        self, module: Sequence[str], *, within_s: float, python: str = sys.executable
    ) -> "subprocess.CompletedProcess[str]":
        """The copy's code comes first, for all processes that are started."""
        tree = self._folder
        paths = (tree, tree / "services/decode", tree / "services/prefill")
        return subprocess.run(
            [python, "-m", *module],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
