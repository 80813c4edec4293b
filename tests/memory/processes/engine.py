"""An engine: creates a segment, passes it, then does what each line of its stdin says."""

import os
import sys

import anyio

from kvbus.memory import SharedSegment
from kvbus.memory.attach import AttachClient


def obey(line: str, segment: SharedSegment) -> str:
    match line.split():
        case ["write", offset, value]:
            segment.view()[int(offset)] = int(value)
            return "written"
        case ["read", offset]:
            return str(segment.view()[int(offset)])
        case ["truncate"]:
            try:
                os.ftruncate(segment.fd, 0)
            except PermissionError as error:
                return type(error).__name__
            return "truncated"
    raise ValueError(line)


async def main(path: str, name: str, size_bytes: int) -> None:
    with SharedSegment(size_bytes, name=name) as segment:
        async with AttachClient(path) as client:
            await client.call({"size_bytes": size_bytes}, [segment.fd])
            print("attached", flush=True)
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                print(obey(line, segment), flush=True)


anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
