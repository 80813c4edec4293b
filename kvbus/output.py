"""What a command writes to stdout and stderr, and how it ends with an error.

A closed stdout loses the text and not the exit status.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import NoReturn

import msgspec

from kvbus.text import ascii_text, printable


def write_json(value: object) -> None:
    """One line of JSON to stdout."""
    write_text(json_text(value) + "\n")


def json_text(value: object) -> str:
    """JSON in which every character is printable."""
    return printable(msgspec.json.encode(value).decode())


def write_text(text: str) -> bool:
    """Text to stdout; whether it came there.

    A pipe without a reader is no error, a full disk is told on stderr. What the encoding of stdout
    lacks is escaped.
    """
    if sys.stdout is None:  # Python found it closed
        return False
    try:
        sys.stdout.write(text if can_write(text) else ascii_text(text))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"error: cannot write to stdout: {error.strerror}\n")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # some Pythons write what is left once more at exit
        os.close(nowhere)
        return False
    return True


def can_write(text: str) -> bool:
    """Whether the encoding of stdout has all of the text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def waiting_for(what: str, *, after_s: float = 3.0) -> Iterator[Callable[[str], None]]:
    """Say on stderr what a command waits for, if that takes longer than ``after_s``.

    What is yielded tells what it waits for next.
    """
    timers: list[Timer] = []

    def wait_for(what: str) -> None:
        for timer in timers:
            timer.cancel()
        timers[:] = [Timer(after_s, sys.stderr.write, [f"waiting for {printable(what)}\n"])]
        timers[0].daemon = True
        timers[0].start()

    wait_for(what)
    try:
        yield wait_for
    finally:
        timers[0].cancel()


def complain(message: str) -> None:
    """One line of stderr about an error."""
    sys.stderr.write(f"error: {printable(message)}\n")


def fail(message: str, *, status: int, cause: Exception) -> NoReturn:
    """Say what is wrong in one line of stderr, and end with this exit status."""
    complain(message)
    raise SystemExit(status) from cause
