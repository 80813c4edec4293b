"""A process that `test_process` asks: it echoes, waits, refuses, and ends."""

import asyncio
import sys

import anyio

from kvbus.errors import ErrorCode, LocalError
from kvbus.lab.process import serve

LAST_WORDS = "its last words"


class Answering:
    async def echo(self, after_s: float = 0.0, **given: object) -> object:
        await asyncio.sleep(after_s)
        return given

    def refuse(self) -> None:
        raise LocalError("no room", code=ErrorCode.BUSY)

    def end(self) -> None:
        sys.exit(LAST_WORDS)


if __name__ == "__main__":
    anyio.run(serve, Answering())
