"""One end of the line between driver and engine: messages as JSON lines over a Unix socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from kvbus.errors import ProtocolError

MAX_LINE_BYTES = 1 << 20

T = TypeVar("T")


class Line(Generic[T]):
    """Sends any message, and receives those of ``received`` until the other end closes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: object
    ) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(received)

    @classmethod
    async def over(cls, end: socket.socket, received: object) -> "Line[T]":
        """The line over this end of a connection, which it closes."""
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=MAX_LINE_BYTES)
        return cls(reader, writer, received)

    def close(self) -> None:
        """Close this end; idempotent."""
        self._writer.close()

    async def send(self, message: object) -> None:
        """Send one line; what the other end does not hear any more is dropped."""
        with suppress(OSError):
            self._writer.write(msgspec.json.encode(message) + b"\n")
            await self._writer.drain()

    async def __aiter__(self) -> AsyncIterator[T]:
        """The lines until the end; raises `ProtocolError` for one that is no message."""
        with suppress(OSError):
            while line := await self._reader.readline():
                try:
                    yield self._decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise ProtocolError(f"{line[:200]!r} is no message: {error}") from error
