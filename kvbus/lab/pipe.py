"""A pipe between a command on a prefill machine and one on a decode machine, in place of a router.

    kvbus demo-prefill ... | kvbus demo-decode ...

Each message is a line of JSON. Neither end waits for ever: the writer detects the end of the reader
without writing, and the reader times out.
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
"""Exceeds the prefill side's wait for its reader, and the time to type a password of ssh."""
RELEASED_WITHIN_S = 2.0
"""Grace time after the reader has ended: it may have received all lines."""

M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True)
class Pipe:
    writer: str
    reader: str

    def write(self, message: msgspec.Struct) -> None:
        if not write_text(msgspec.json.encode(message).decode() + "\n"):
            raise self._reader_gone()

    async def watch_reader(self) -> None:
        """Raise `PeerLost` when the reader has closed stdout.

        Returns if stdout is a file. Raises `ConfigError` at a terminal.
        """
        if sys.stdout is None or sys.stdout.isatty():
            raise ConfigError(f"stdout is no pipe: {self._how} (over ssh without -t)")
        with select.epoll() as hang_ups:  # readable after a hang-up
            try:
                hang_ups.register(sys.stdout.fileno(), 0)
            except PermissionError:  # a file has no reader
                return
            await anyio.wait_readable(hang_ups.fileno())
        await anyio.sleep(RELEASED_WITHIN_S)
        raise self._reader_gone()

    async def read(self, kind: type[M]) -> AsyncIterator[M]:
        """Yield the messages on stdin without end: the caller knows which one is the last.

        Raises `ConfigError` at a terminal and for an invalid line, `PeerLost` when stdin ends, and
        `RequestTimeout` after `NEXT_WITHIN_S` without a line.
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
    """Yield whole lines, without a thread: a blocked thread could not be stopped."""
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
