"""A copy of the source tree, whose code is changed and tested while the original stays."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.tools.mutants.mutant import ROOT, Mutant

GIT = shutil.which("git") or "git"
KERNEL = "kvbus/memory/copy_runs.so"
PYTHON_OF_VLLM = str(ROOT / ".venv-vllm/bin/python")
TEST_WITHIN_S = 300
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
        """Run them; the copy's code comes first for all processes that they start."""
        options = ["-q", "-x", "-p", "no:cacheprovider", *self._chosen]
        paths = (self._folder / one for one in (".", "services/decode", "services/prefill"))
        ended = subprocess.run(
            [python, "-m", "pytest", *options, *names],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            timeout=TEST_WITHIN_S * len(names),
            check=False,
        )
        if ended.returncode not in (PASSED, FAILED):
            raise RuntimeError(f"pytest could not run {names}:\n{ended.stdout}{ended.stderr}")
        return ended.returncode == PASSED
