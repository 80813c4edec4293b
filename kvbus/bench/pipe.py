"""The pipe ``kvbus bench-prefill | kvbus bench-decode``: lines of JSON, in place of a router."""

import os
import select
import sys
from collections.abc import AsyncIterator
from typing import TypeVar

import anyio
import msgspec

from kvbus.errors import ConfigError, PeerLost, RequestTimeout, reason_of
from kvbus.output import write_text

WRITER, READER = "kvbus bench-prefill", "kvbus bench-decode"
HOW = f"pipe what {WRITER} prints into {READER}"
MAX_LINE_BYTES = 1 << 20
NEXT_WITHIN_S = 120.0
"""Exceeds the prefill side's wait for its reader, and the time to type a password of ssh."""
RELEASED_WITHIN_S = 2.0
"""Grace time after the reader has ended: it may have received all lines."""

M = TypeVar("M", bound=msgspec.Struct)


def write(message: msgspec.Struct) -> None:
    if not write_text(msgspec.json.encode(message).decode() + "\n"):
        raise _reader_gone()


async def watch_reader() -> None:
    """Raise `PeerLost` when the reader has closed stdout, and `ConfigError` at a terminal."""
    if sys.stdout is None or sys.stdout.isatty():
        raise ConfigError(f"stdout is no pipe: {HOW} (over ssh without -t)")
    with select.epoll() as hang_ups:  # readable after a hang-up
        try:
            hang_ups.register(sys.stdout.fileno(), 0)
        except PermissionError:  # a file has no reader
            return
        await anyio.wait_readable(hang_ups.fileno())
    await anyio.sleep(RELEASED_WITHIN_S)
    raise _reader_gone()


async def read(kind: type[M]) -> AsyncIterator[M]:
    """Yield the messages on stdin without end: the caller knows the last.

    Raises `ConfigError` at a terminal and for an invalid line, `PeerLost`, or `RequestTimeout`.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(f"stdin is no pipe: {HOW}")
    lines = _lines(sys.stdin.fileno())
    while True:
        with anyio.move_on_after(NEXT_WITHIN_S) as waiting:
            line = await anext(lines, b"")
        if waiting.cancelled_caught:
            raise RequestTimeout(
                f"no line came for {NEXT_WITHIN_S:g} s: check {WRITER} and its agent"
            )
        if not line:
            raise PeerLost(f"stdin ended before the last handoff: see the error of {WRITER}")
        try:
            message = msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            text = line[:40].decode(errors="replace")
            raise ConfigError(
                f"stdin: {text!r} is no line of {WRITER}: {reason_of(error)}"
            ) from error
        yield message


def _reader_gone() -> PeerLost:
    return PeerLost(f"the lines have no reader any more: see the error of {READER}")


async def _lines(fd: int) -> AsyncIterator[bytes]:
    """Yield whole lines, without a thread: a blocked one could not be stopped."""
    buffer = b""
    while piece := await _read(fd):
        *whole, buffer = (buffer + piece).split(b"\n")
        if len(buffer) > MAX_LINE_BYTES:
            whole.append(buffer)
        for line in whole:
            yield line


async def _read(fd: int) -> bytes:
    try:
        await anyio.wait_readable(fd)
    except PermissionError:  # a file, which cannot be polled
        await anyio.lowlevel.checkpoint()
    return os.read(fd, MAX_LINE_BYTES)
