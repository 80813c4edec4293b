"""Data process as a child of this process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial

from kvbus.data.channel import channel_to_data
from kvbus.data.client import OnExit, OnMessage, Spawn
from kvbus.data.messages import ToData
from kvbus.errors import ClosedError, ProtocolError

MAX_MESSAGES_A_TURN = 256


def spawner(loop: asyncio.AbstractEventLoop, *, held_fds: Iterable[int] = ()) -> Spawn:
    return partial(_DataChild, loop, tuple(held_fds))


# The kernel closes a process's descriptors after dropping its memory. So once the pidfd is
# readable, no write of the process can land. Replies of completed jobs may still be in the channel:
# they are read first, and only then is the end reported.
class _DataChild:
    """Spawned by the main thread: the end of another thread would kill the process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        held_fds: tuple[int, ...],
        _boot: str,
        on_message: OnMessage,
        on_exit: OnExit,
    ) -> None:
        self._loop, self._on_message, self._on_exit = loop, on_message, on_exit
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "kvbus.data", str(number)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(number, *held_fds)
            )
        self._channel = channel_to_data(ours)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._is_writing = False
        loop.add_reader(self._channel.fileno(), self._read)
        loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToData, fds: Sequence[int] = ()) -> None:
        self._channel.send(message, fds)
        if self._channel.has_unsent and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._channel.fileno(), self._write)

    def kill(self) -> None:
        if self._process.returncode is None:  # else it has ended already
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _write(self) -> None:
        try:
            self._channel.flush()
        except ClosedError:
            self.kill()
        if not self._channel.has_unsent:
            self._is_writing = False
            self._loop.remove_writer(self._channel.fileno())

    def _read(self) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):
            if not self._read_one():
                return

    def _read_one(self) -> bool:
        try:
            received = self._channel.receive()
        except (ClosedError, ProtocolError):
            self._loop.remove_reader(self._channel.fileno())
            self.kill()  # useless without a channel
            return False
        if received is None:
            return False
        self._on_message(received[0])
        return True

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = self._process.wait()
        try:
            while self._read_one():
                pass
        finally:  # report the end even if a reply cannot be handled
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()
            os.close(self._pidfd)
            self._on_exit(_reason(status))


def _reason(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    number = -status
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    hint = " (is memory short? the kernel kills so)" if number == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
