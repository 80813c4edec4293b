"""The baseline: bare NIXL between two processes of its own, told when to read.

Refuses to read while kvbus does: its processes sleep between rounds.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import anyio
import numpy as np

from kvbus.bench.processes import running
from kvbus.errors import KVBusError
from kvbus.planning import Descriptors

MODULE = "kvbus.bench.raw_process"


class RawPair:
    """A target and a reader with the same descriptors as kvbus."""

    def __init__(self, target: subprocess.Popen[bytes], reader: subprocess.Popen[bytes]) -> None:
        self._target, self._reader = target, reader
        _write(reader.stdin, _line(target))

    async def verify(self) -> None:
        """Read once and compare every byte; raises `KVBusError`."""
        await self._ask(b"verify\n")

    async def read_s(self) -> float:
        """Seconds of one READ."""
        return await self._ask(b"read\n")

    async def _ask(self, command: bytes) -> float:
        return await anyio.to_thread.run_sync(self._ask_blocking, command)

    def _ask_blocking(self, command: bytes) -> float:
        _write(self._target.stdin, b"d")
        try:
            _write(self._reader.stdin, command)
            return float(_line(self._reader))
        finally:
            _write(self._target.stdin, b"r")


@contextlib.contextmanager
def raw_pair(rows: Descriptors, size_bytes: int, folder: Path) -> Iterator[RawPair]:
    """Start both processes, with memory of ``size_bytes`` each; ``rows`` are offsets into it."""
    path = folder / "rows.npz"
    np.savez(path, local=rows.local, remote=rows.remote)
    size, log = str(size_bytes), folder / "raw.log"
    with (
        running(MODULE, "target", size, log=log) as target,
        running(MODULE, "reader", size, str(path)) as reader,
    ):
        yield RawPair(target, reader)


def _line(process: subprocess.Popen[bytes]) -> bytes:
    line = process.stdout.readline() if process.stdout else b""
    if not line:
        raise KVBusError("a process of the raw baseline ended")
    return line


def _write(pipe: IO[bytes] | None, what: bytes) -> None:
    if pipe is None:
        raise KVBusError("a process of the raw baseline has no stdin")
    pipe.write(what)
    pipe.flush()
