"""A pipe from a command of a prefill machine to one of a decode machine: a router by hand.

    kvbus demo-prefill ... | kvbus demo-decode ...

A line of JSON for each message. Neither end waits for ever for the other: a reader that has ended
is seen though nothing is written, and a writer that says nothing is not waited for.
"""

import os
import select
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

import anyio
import msgspec

from kvbus.errors import ConfigError, PeerLost, RequestTimeout, reason_of
from kvbus.output import write_text

MAX_LINE_BYTES = 1 << 20
NEXT_WITHIN_S = 120.0
"""Longer than a prefill side waits for its reader, and than a person for a password of ssh."""
RELEASED_WITHIN_S = 2.0
"""After the reader of the lines has ended: it may have had all of them."""

M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True)
class Pipe:
    """From the command ``writer`` to the command ``reader``; each end is in one of them."""

    writer: str
    reader: str

    def write(self, message: msgspec.Struct) -> None:
        """Write a line; raises `PeerLost` when nobody reads it."""
        if not write_text(msgspec.json.encode(message).decode() + "\n"):
            raise self._reader_gone()

    async def watch_reader(self) -> None:
        """Raise `PeerLost` when nobody has the other end of stdout any more.

        Returns where that cannot be seen. Raises `ConfigError` at a terminal.
        """
        if sys.stdout is None or sys.stdout.isatty():
            raise ConfigError(f"stdout is no pipe: {self._how} (over ssh without -t)")
        with select.epoll() as hang_ups:  # itself readable when there is one
            try:
                hang_ups.register(sys.stdout.fileno(), 0)
            except PermissionError:  # a file has no other end
                return
            await anyio.wait_readable(hang_ups.fileno())
        await anyio.sleep(RELEASED_WITHIN_S)
        raise self._reader_gone()

    async def read(self, kind: type[M]) -> AsyncIterator[M]:
        """What the lines of stdin say, for ever: the caller knows which is the last.

        Raises `ConfigError` at a terminal and for a line that is something else, `PeerLost` when
        stdin ends, and `RequestTimeout` when nothing comes.
        """
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(f"stdin is no pipe: {self._how}")
        lines = _lines(sys.stdin.fileno())
        while True:
            with anyio.move_on_after(NEXT_WITHIN_S) as waiting:
                line = await anext(lines, b"")
            if waiting.cancelled_caught:
                raise RequestTimeout(
                    f"no line came for {NEXT_WITHIN_S:g} s: look at {self.writer}, and at its agent"
                )
            if not line:
                raise PeerLost(
                    f"stdin ended before the last handoff: look at the error of {self.writer}"
                )
            try:
                message = msgspec.json.decode(line, type=kind)
            except msgspec.DecodeError as error:
                text = line[:40].decode(errors="replace")
                raise ConfigError(
                    f"stdin: {text!r} is no line of {self.writer}: {reason_of(error)}"
                ) from error
            yield message

    @property
    def _how(self) -> str:
        return f"pipe what {self.writer} prints into {self.reader}"

    def _reader_gone(self) -> PeerLost:
        return PeerLost(f"nobody reads the lines any more: look at the error of {self.reader}")


async def _lines(fd: int) -> AsyncIterator[bytes]:
    """Whole lines. No thread reads them: it could not be ended while nothing comes."""
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
    except PermissionError:  # it is a file, which never lets wait
        await anyio.lowlevel.checkpoint()
    return os.read(fd, MAX_LINE_BYTES)
