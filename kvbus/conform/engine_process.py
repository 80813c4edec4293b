"""Owns the process of the engine under test: its environment, its lines in both directions.

Refuses to read meaning into lines that do not start with a word that is waited for: an engine may
print what it likes between them.
"""

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

from kvbus.protocol.engine import AgentRole
from kvbus.spawn import Child

ATTACH_VARIABLE, ROLE_VARIABLE = "KVBUS_ATTACH", "KVBUS_ROLE"
END_S = 2.0
MAX_LINE_BYTES = 1 << 20


class EngineProcess:
    """The command, started anew by `start`; ``lines`` is what it printed, in words."""

    def __init__(self, command: Sequence[str], attach: Path, role: AgentRole, log: Path) -> None:
        self.lines: list[list[str]] = []
        self.num_starts = 0
        self._command, self._log = command, log
        self._env = {ATTACH_VARIABLE: str(attach), ROLE_VARIABLE: role.value}
        self._child: Child | None = None
        self._rest = b""

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.is_alive

    def start(self) -> None:
        """Start the command; raises `ConfigError` when it cannot be."""
        self.num_starts += 1
        self._rest = b""
        self._child = Child.start(
            "engine", self._command, log=self._log, stdin=PIPE, stdout=PIPE, env=self._env
        )
        os.set_blocking(self._output(), False)

    def stop(self, within_s: float = END_S) -> int | None:
        """Close its stdin, read what it says, kill it if it takes longer.

        Returns its exit status, None if it was not started.
        """
        if self._child is None:
            return None
        self.hush()
        end = time.monotonic() + within_s
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._output()], [], [], left)
            if ready and not self.on_readable():
                break
        status = self._child.end(max(0.0, left))
        self._child = None
        return status

    def hush(self) -> None:
        """Close its stdin, which tells it to end."""
        if self._child is not None:
            self._child.ask_to_end()

    def fileno(self) -> int | None:
        """Its stdout, for a poller."""
        return None if self._child is None or self._child.process.stdout is None else self._output()

    def say(self, *words: object) -> None:
        """Write a line to its stdin; nobody may be there to read it."""
        if self._child is None or self._child.process.stdin is None:
            return
        with suppress(BrokenPipeError):
            self._child.process.stdin.write(f"{' '.join(map(str, words))}\n".encode())
            self._child.process.stdin.flush()

    def on_readable(self) -> bool:
        """Take in what it printed; False at the end of its output."""
        try:
            chunk = os.read(self._output(), 65_536)
        except BlockingIOError:
            return True
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-MAX_LINE_BYTES:]
        for line in whole:
            self.lines.append(line.decode(errors="replace").split(" ", 2))
        return bool(chunk)

    def told(self, word: str, name: int) -> list[str]:
        """What it said of this name, one text for each line that begins so."""
        return [" ".join(line[2:]).strip() for line in self.lines if line[:2] == [word, str(name)]]

    def last_words(self) -> str:
        """How it ended, and the end of its log."""
        return (
            "it was not started" if self._child is None else self._child.lost("is silent").message
        )

    def _output(self) -> int:
        if self._child is None or self._child.process.stdout is None:
            raise RuntimeError("the engine's process is not running")
        return self._child.process.stdout.fileno()
