"""A process that touches memory whose file was cut under it."""

import signal
import subprocess
from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("arguments", "status"), [((), 0), (("unwatched",), -signal.SIGBUS)], ids=["watched", "other"]
)
def test_cut_memory_reads_as_zeros_and_any_other_bus_error_still_ends_the_process(
    child_command: Callable[..., list[str]], arguments: tuple[str, ...], status: int
) -> None:
    ended = subprocess.run(
        child_command("cut_memory", *arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.stdout, ended.returncode) == ("False True 0\n", status)
