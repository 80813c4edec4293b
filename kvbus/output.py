"""Output and error exits of commands. A closed stdout does not change the exit status."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import NoReturn

import msgspec

from kvbus.text import ascii_text, printable


def write_json(value: object) -> None:
    write_text(json_text(value) + "\n")


def json_text(value: object) -> str:
    """Escape unprintable characters."""
    return printable(msgspec.json.encode(value).decode())


def write_text(text: str) -> bool:
    """Return whether that succeeded. Report errors except a closed pipe on stderr."""
    if sys.stdout is None:  # closed before Python started
        return False
    try:
        sys.stdout.write(text if can_write(text) else ascii_text(text))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"error: cannot write to stdout: {error.strerror}\n")
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())  # Python may flush the buffer again at exit
        os.close(devnull)
        return False
    return True


def can_write(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


_shown_by: list[Callable[[str], None]] = []


@contextmanager
def waits_shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Let ``show`` report at once what a command waits for, in place of lines on stderr."""
    _shown_by.append(show)
    try:
        yield
    finally:
        _shown_by.remove(show)


@contextmanager
def waiting_for(what: str, *, after_s: float = 3.0) -> Iterator[Callable[[str], None]]:
    """Print on stderr what a command waits for, after ``after_s``; yield a setter for it."""
    timers: list[Timer] = []

    def wait_for(what: str) -> None:
        for timer in timers:
            timer.cancel()
        text = f"waiting for {what}"
        if _shown_by:
            _shown_by[-1](text)
            return
        timers[:] = [Timer(after_s, sys.stderr.write, [f"{printable(text)}\n"])]
        timers[0].daemon = True
        timers[0].start()

    wait_for(what)
    try:
        yield wait_for
    finally:
        for timer in timers:
            timer.cancel()


def complain(message: str) -> None:
    sys.stderr.write(f"error: {printable(message)}\n")


def fail(message: str, *, status: int, cause: Exception) -> NoReturn:
    complain(message)
    raise SystemExit(status) from cause
