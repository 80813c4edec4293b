"""Ctrl-C while a program imports: Python would print a traceback, or the import another error."""

import os
import signal

STATUS = 130


def end_at_once(*_: object) -> None:
    """A handler of signals: nothing is open yet."""
    os._exit(STATUS)


def end_at_ctrl_c() -> None:
    """For the first line of a program, before its imports."""
    signal.signal(signal.SIGINT, end_at_once)


def raise_at_ctrl_c() -> None:
    """For behind the imports, if `end_at_ctrl_c` was called: Ctrl-C is a `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
