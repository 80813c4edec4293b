"""Processes that are stopped for a while, so that a test meets the moment that it is about.

Refuses to leave one stopped.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def halted(pids: Sequence[int]) -> Iterator[None]:
    """These processes do nothing meanwhile."""
    assert pids, "no process to stop"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
