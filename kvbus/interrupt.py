"""Interrupts of a program's imports: Ctrl-C, and missing packages."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STATUS = 130


def end_at_once(*_: object) -> None:
    os._exit(STATUS)


@contextmanager
def importing() -> Iterator[None]:
    """Exit silently at Ctrl-C, with one line for a missing package."""
    signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing.startswith("kvbus"):
            raise
        sys.exit(
            f"error: the package '{missing}' is not installed here: agents and commands need "
            "pip install 'kvbus[agent]'; kvbus alone is for engines"
        )


def raise_at_ctrl_c() -> None:
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
