"""Process of the engine under test."""

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import IO

from kvbus.protocol.engine import AgentRole
from kvbus.spawn import Child
from kvbus.variables import Variable

END_S = 2.0
MAX_LINE_BYTES = 1 << 20


class EngineCommand:
    def __init__(self, command: Sequence[str], attach_path: Path, role: AgentRole, log: Path):
        self.attach_path = attach_path
        self._command, self._log = command, log
        self._env: dict[str, str] = {
            Variable.ATTACH: str(attach_path),
            Variable.ROLE: role.value,
        }
        self._child: Child | None = None
        self._lines: list[list[str]] = []
        self._rest = b""

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive

    def start(self) -> None:
        self._rest = b""
        self._child = Child.start(
            "engine", self._command, log=self._log, stdin=PIPE, stdout=PIPE, env=self._env
        )
        os.set_blocking(_pipe(self._child.process.stdout).fileno(), False)

    def stop(self, within_s: float = END_S) -> int | None:
        if self._child is None:
            return None
        self.request_end()
        output, deadline = _pipe(self._child.process.stdout), time.monotonic() + within_s
        while (left_s := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([output], [], [], left_s)
            if ready and not self.on_readable():
                break
        status = self._child.end(max(0.0, left_s))
        self._child = None
        return status

    def request_end(self) -> None:
        if self._child is not None:
            self._child.request_end()

    def fileno(self) -> int | None:
        return None if self._child is None else _pipe(self._child.process.stdout).fileno()

    def send_line(self, *fields: object) -> None:
        if self._child is not None:
            stdin = _pipe(self._child.process.stdin)
            with suppress(BrokenPipeError):
                stdin.write(f"{' '.join(map(str, fields))}\n".encode())
                stdin.flush()

    def on_readable(self) -> bool:
        output = self.fileno()
        if output is None:
            return False
        try:
            chunk = os.read(output, 65_536)
        except BlockingIOError:
            return True
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        self._lines += [line.decode(errors="replace").split(" ", 2) for line in whole]
        return bool(chunk)

    def reported(self, kind: str, name: int) -> list[str]:
        return [" ".join(line[2:]).strip() for line in self._lines if line[:2] == [kind, str(name)]]

    def silence_reason(self) -> str:
        return (
            "it was not started" if self._child is None else self._child.lost("is silent").message
        )


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("the engine's process has no such pipe")
    return stream
