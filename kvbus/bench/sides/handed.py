"""The line of JSON that the prefill side prints for each handoff, and how the decode side reads it.

Refuses lines that are none, and to wait for ever for the next one.
"""

import os
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
import msgspec

from kvbus.errors import ConfigError, PeerLost, RequestTimeout

MAX_MIB = 1024
MAX_LINE_BYTES = 1 << 20
NEXT_WITHIN_S = 120.0
"""Longer than the prefill side waits for its reader, and than a person for a password of ssh."""
PIPE_IT = "pipe what kvbus bench-prefill prints into kvbus bench-decode"


class Handed(msgspec.Struct, frozen=True):
    """One handoff: its case, how large that is, its ticket, and how many lines follow."""

    case: str
    mib: Annotated[int, msgspec.Meta(ge=1, le=MAX_MIB)]
    left: Annotated[int, msgspec.Meta(ge=0)]
    ticket: dict[str, Any]


async def handed_over() -> AsyncIterator[Handed]:
    """What the lines of stdin hand over, until the last one.

    Raises `ConfigError` for a line that is none, `PeerLost` when stdin ends too early, and
    `RequestTimeout` when nothing comes.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(f"stdin is no pipe: {PIPE_IT}")
    lines, left = _lines(sys.stdin.fileno()), 1
    while left:
        with anyio.move_on_after(NEXT_WITHIN_S) as waiting:
            line = await anext(lines, b"")
        if waiting.cancelled_caught:
            raise RequestTimeout(
                f"no line came for {NEXT_WITHIN_S:g} s: look at kvbus bench-prefill, and at its"
                " agent"
            )
        if not line:
            raise PeerLost(
                "stdin ended before the last handoff: look at the error of kvbus bench-prefill"
            )
        handed = _parsed(line)
        left = handed.left
        yield handed


def _parsed(line: bytes) -> Handed:
    try:
        return msgspec.json.decode(line, type=Handed)
    except msgspec.DecodeError as error:
        text = line[:40].decode(errors="replace")
        raise ConfigError(f"stdin: {text!r} is no line of kvbus bench-prefill: {error}") from error


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
