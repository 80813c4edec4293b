"""Agents and engines that start in a quarter of the time: forks of a process with their imports.

    pytest ──exec──▶ fork server, one each for agents, data processes and engines
      │                   │ fork
      │                   ├──▶ a process that ends at once
      │                   │      │ fork
      └──adopts───────────┼──────┴──▶ the agent

A server imports what it is for and then waits, with one thread, no event loop, no ZeroMQ context,
no NIXL agent and no UCX. While an agent starts, pytest adopts orphans (PR_SET_CHILD_SUBREAPER). So
the agent is a child of pytest as if pytest had started it: pytest signals it, waits for it and gets
its exit status, and it ends with pytest (PR_SET_PDEATHSIG, as in `kvbus.spawn`).

The agent gets the environment, the folder and the streams of its start; only its command line in
/proc is the server's.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, ClassVar, Protocol

AGENTS = (
    *("kvbus_prefill.__main__", "kvbus_decode.__main__"),
    *("kvbus.agent.command", "kvbus_prefill.prefill_service", "kvbus_decode.decode_service"),
)
DATA = ("kvbus.data.__main__", "kvbus.data.loop")
ENGINES = ("tests.support.engine_program",)
READ_AT_IMPORT = ("PYTHON", "LD_", "MALLOC_", "GLIBC_")
"""How the variables begin that must be there before Python starts; NIXL is loaded after a fork."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's import starts threads otherwise, and only the one that forks is in the new process."""
ADOPTED_WITHIN_S = 10.0
MAX_REQUEST_BYTES = 1 << 17
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Stream = int | HasDescriptor | None


class Forked(subprocess.Popen[bytes]):
    """`python -m MODULE`: its ``main`` runs in a fork of a server that has imported the module.

    It has Popen's interface, and its own start and wait: `Popen` would start a Python. A command
    may begin with a runner, such as ``ip netns exec NAME``, which has a fork server of its own.
    """

    imported: ClassVar[Sequence[str]] = AGENTS

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.args, self.stdin, self.stdout, self.stderr = args, None, None, None
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        at = args.index(sys.executable)
        server = _server(self.imported, tuple(args[:at]))
        with ExitStack() as theirs:
            streams = [_end(theirs, one, at) for at, one in enumerate((stdin, stdout, stderr))]
            if stdin == PIPE:
                streams[0], ours = os.pipe()
                theirs.callback(os.close, streams[0])
                self.stdin = os.fdopen(ours, "wb", buffering=0)
            if stdout == PIPE:
                ours, streams[1] = os.pipe()
                theirs.callback(os.close, streams[1])
                self.stdout = os.fdopen(ours, "rb", buffering=0)
            self.pid = server.fork(args[at:], os.environ if env is None else env, streams)
        self._pidfd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._pidfd)

    def __exit__(self, *_: object) -> None:
        for pipe in filter(None, (self.stdin, self.stdout)):
            pipe.close()
        self.wait()

    def __del__(self) -> None:
        """Do nothing: Popen's own needs Popen's start."""

    def poll(self) -> int | None:
        """Reap it if it has ended; return the exit status."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = select.poll()
        end.register(self._pidfd, select.POLLIN)
        if not end.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, sig)


def _end(theirs: ExitStack, stream: Stream, at: int) -> int:
    """The descriptor that a process gets for a stream; a pipe is made later."""
    if stream == DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, null)
        return null
    if stream is None or stream == PIPE:
        return at
    return stream if isinstance(stream, int) else stream.fileno()


class ForkedEngine(Forked):
    """The same, of what needs torch and the SDK."""

    imported = ENGINES


class ForkedData(Forked):
    """The same, of data processes."""

    imported = DATA


def can_fork(env: Mapping[str, str], runner: Sequence[str] = ()) -> bool:
    """Whether a process with this environment is the same from the fork server."""
    return _read_at_import(env) == _read_at_import(_server(AGENTS, tuple(runner)).env)


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in env.items() if name.startswith(READ_AT_IMPORT)}


class ForkServer:
    """A server, seen from pytest."""

    def __init__(self, modules: Sequence[str], runner: Sequence[str]) -> None:
        self.env = dict(os.environ)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Not its folder comes first on the path of imports, in which there is a module `plan`.
            command = [*runner, sys.executable, "-P", __file__, *modules]
            env = {**self.env, **ONE_THREAD}
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=env)
        atexit.register(self._end)

    def _end(self) -> None:
        self._channel.close()
        self._process.wait()

    def fork(self, command: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> int:
        """The pid of a new child of this process."""
        request = {"command": command, "env": dict(env), "parent": os.getpid()}
        request["folder"] = str(Path.cwd())
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
            return int(self._channel.recv(16))
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)


@cache
def _server(modules: Sequence[str], runner: Sequence[str]) -> ForkServer:
    return ForkServer(modules, runner)


def serve(modules: Sequence[str]) -> Callable[[], None]:
    """Fork until pytest has ended; in a forked process, return what it is to run."""
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    added = {name: text for name, text in os.environ.items() if before.get(name) != text}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    gc.collect()
    gc.freeze()  # so that pages stay shared
    while True:
        text, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 3)
        if not text:
            end_at_once()
        if (between := os.fork()) == 0:
            if os.fork() != 0:
                end_at_once()
            request = json.loads(text)
            _be_adopted(request["parent"])
            _become(request, fds, added=added)
            channel.send(str(os.getpid()).encode())
            channel.close()
            return partial(_run, request["command"][2])
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _run(name: str) -> None:
    package = f"{name}.__main__"
    importlib.import_module(package if package in sys.modules else name).main()


def _be_adopted(parent: int) -> None:
    deadline = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0005)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end_at_once()


def _become(request: Mapping[str, Any], streams: list[int], *, added: Mapping[str, str]) -> None:
    """As it would be after an exec and the same imports."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**added, **request["env"]})
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(request["command"][2:])


def end_at_once() -> None:
    """What was imported has nothing to tidy up, and might try."""
    os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    serve(sys.argv[1:])()
