"""Processes that touch memory whose file was cut under it, or may map nothing more."""

import signal
import subprocess
from collections.abc import Callable

import pytest

CUT = {  # arguments; what the process says, and how it ends
    "mapped": (["cut_memory", "mapped"], "False True 0\n", 0),
    "that of others": (["cut_memory", "unwatched"], "False True 0\n", -signal.SIGBUS),
    "copied by the kernel": (["cut_memory", "copied", "LIBRARY"], "False True 0\n", 0),
    "copied by numpy": (["cut_memory", "copied", "none"], "False True 0\n", 0),
    "lent": (["cut_memory", "lent"], "False True 0\n", 0),
    "one mapping too many": (["many_mappings"], "busy True\n", 0),
}
"""Cut memory reads as zeros, whoever reads it is told before, and any other bus error is fatal."""


@pytest.mark.parametrize("case", CUT)
def test_a_process_lives_on_though_its_memory_is_cut_and_reads_zeros(
    child_command: Callable[..., list[str]], request: pytest.FixtureRequest, case: str
) -> None:
    (name, *arguments), says, status = CUT[case]
    if "LIBRARY" in arguments:
        arguments = [str(request.getfixturevalue("library"))]

    ended = subprocess.run(
        child_command(name, *arguments), capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.stdout, ended.returncode) == (says, status), ended.stderr
