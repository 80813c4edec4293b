"""What can happen while a program imports: Ctrl-C, and a package that is not installed."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STATUS = 130


def end_at_once(*_: object) -> None:
    """A handler of signals: nothing is open yet."""
    os._exit(STATUS)


@contextmanager
def importing() -> Iterator[None]:
    """For all that a program does, its imports first: what fails there is a line, or silent."""
    signal.signal(signal.SIGINT, end_at_once)
    try:
        yield
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing.startswith("kvbus"):
            raise
        sys.exit(
            f"error: the package '{missing}' is not installed here: install kvbus with all that it "
            "requires; without (--no-deps) it is for engines alone"
        )


def raise_at_ctrl_c() -> None:
    """For behind the imports, if `importing` is under way: Ctrl-C is a `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
