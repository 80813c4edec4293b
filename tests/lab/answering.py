"""A process that `test_process` asks: it echoes, waits, refuses, and ends."""

import asyncio
import sys

import anyio

from kvbus.errors import ErrorCode, LocalError
from kvbus.lab.process import Question, serve

LAST_WORDS = "its last words"


async def answer(question: Question) -> object:
    await asyncio.sleep(question.given.get("after_s", 0.0))
    if question.do == "refuse":
        raise LocalError("no room", code=ErrorCode.BUSY)
    if question.do == "end":
        sys.exit(LAST_WORDS)
    return [question.engine, question.given]


if __name__ == "__main__":
    anyio.run(serve, answer)
