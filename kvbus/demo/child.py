"""One child process of the demo: started, watched, asked to end, and ended.

Refuses to end unnoticed: a child that nobody asked to end is a `PeerLost` with its last words.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import anyio
from anyio.abc import Process

from kvbus.errors import ConfigError, PeerLost

END_TIMEOUT_S = 5.0
NUM_LAST_LINES = 8


@dataclass(slots=True)
class Child:
    """A Python module that runs in a session of its own, so that Ctrl-C is the driver's alone."""

    name: str
    process: Process
    log: Path
    ending: bool = False

    @classmethod
    async def start(
        cls, name: str, module: str, argument: str, *, log: Path, is_piped: bool = False
    ) -> "Child":
        """Start ``python -m module argument``; what is not piped goes to ``log``.

        Raises `ConfigError` when that is not possible.
        """
        try:
            with log.open("wb") as output:
                process = await anyio.open_process(
                    [sys.executable, "-m", module, argument],
                    stdin=subprocess.PIPE if is_piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if is_piped else output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot start the {name} with the log {log}: {error}") from error
        return cls(name, process, log)

    async def watch(self) -> None:
        """Return when the process ends as it was asked to; raises `PeerLost` when it was not."""
        status = await self.process.wait()
        if not self.ending:
            raise self._lost(status)

    async def finish(self) -> None:
        """Ask it to end, by its pipe or by SIGTERM; raises `PeerLost` unless it ends well."""
        self.ending = True
        if self.process.stdin is not None:
            await self.process.stdin.aclose()
        else:
            self.process.terminate()
        with anyio.move_on_after(END_TIMEOUT_S):
            await self.process.wait()
        if self.process.returncode != 0:
            raise self._lost(self.process.returncode)

    async def end(self) -> None:
        """End it in any case; SIGTERM first, so that it can clean up."""
        self.ending = True
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.terminate()
                with anyio.move_on_after(END_TIMEOUT_S):
                    await self.process.wait()
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()

    def _lost(self, status: int | None) -> PeerLost:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(f"  {line}" for line in lines[-NUM_LAST_LINES:]) or "  (none)"
        return PeerLost(
            f"the {self.name} (process {self.process.pid}) {_ended(status)};"
            f" the last lines of its log:\n{last}"
        )


def _ended(status: int | None) -> str:
    if status is None:
        return f"did not end within {END_TIMEOUT_S:g} s"
    if status < 0:
        return f"was ended by {Signals(-status).name}"
    return f"ended with exit status {status}"
