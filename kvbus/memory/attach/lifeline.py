"""The lifeline of an agent: a pipe that reaches end-of-file when its last process has ended."""

import asyncio
import os
import weakref
from collections.abc import Callable

from kvbus.errors import ErrorCode, LocalError
from kvbus.memory.attach.channel import close_fds


# A child process of an agent may write into blocks of an engine, too, and outlive the agent. So
# each process holds the write end of one pipe from its start to its end. Engines hold the read end:
#
#     agent    ────────────────────────────────┤ SIGKILL
#     child    ──────────────────────────────────────┤ exits, as it lost the agent
#     pipe     write ends: 2                   1     0 ─▶ end-of-file
#     engine   attach connection ends ─────────┘     └─▶ no process of the agent can write
#
# An exiting process frees its memory first, then closes its descriptors. When the last write end
# closes, no thread can run and no mapping is left. Descriptors of NICs close in the same pass, and
# Linux closes low numbers last: so an agent makes the pipe before it opens any. A write end must
# not leak to another program, which could outlive the agent: only `pass_fds` passes it on.
class Lifeline:
    """The agent's side; child processes that write into blocks inherit ``write_fd``."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        weakref.finalize(self, close_fds, [self._read_fd, self.write_fd])

    def new_read_end(self) -> int:
        """Raises `LocalError` (``busy``)."""
        try:
            return os.dup(self._read_fd)
        except OSError as error:
            message = f"the agent has no descriptor left for an engine: {error.strerror}"
            raise LocalError(message, code=ErrorCode.BUSY) from error


class AgentLife:
    """The engine's side; owns ``fd``. Without it, the agent's end is never detected."""

    def __init__(self, fd: int | None = None) -> None:
        self.has_ended = False
        self._fd, self._calls = fd, list[Callable[[], None]]()
        if fd is not None:
            asyncio.get_running_loop().add_reader(fd, self._end)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` once no process of the agent is left; now, if none is."""
        if self.has_ended:
            call()
        else:
            self._calls.append(call)

    async def ended(self, within_s: float) -> bool:
        over = asyncio.Event()
        call = over.set
        self.when_ended(call)
        try:
            await asyncio.wait_for(over.wait(), within_s)
        except TimeoutError:
            return self.has_ended
        finally:
            self._calls = [one for one in self._calls if one is not call]
        return True

    def release(self) -> None:
        if not self._calls:
            self.close()

    def close(self) -> None:
        self._calls = []
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _end(self) -> None:
        calls = self._calls
        self.close()
        self.has_ended = True
        for call in calls:
            call()
