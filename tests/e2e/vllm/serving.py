"""vLLM servers that start in a quarter of the time: no process of theirs imports vLLM again.

That takes ten seconds of a core, and a server with two ranks is four processes, each spawned by the
one before. Here the first is forked from the server of `tests.support.forked`, which has imported
this module, and the others from a nursery: a copy of their parent as it was before it did anything.

    fork server ──▶ guard ──▶ API server ──▶ engine core ──▶ worker
                                  └▶ nursery ─ ─ ┘ └▶ nursery ─ ┘

What `multiprocessing` spawns reads what it is to do from its pipe, as after an exec.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

from tests.e2e.vllm.guard import PR_SET_CHILD_SUBREAPER, adopt_orphans, prctl, watch
from tests.e2e.vllm.servers import ENTRY, ENVIRONMENT, NETWORK
from tests.support.forked import end_at_once

import_module("setproctitle").getproctitle()  # it looks for its place beside the environment
os.environ.update(ENVIRONMENT)  # before vLLM and torch are imported

ABOVE_ALL_OTHERS = 900
"""Numbers of descriptors that are in nobody's way."""
MAX_REQUEST_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def main() -> None:
    """Serve, in a process below this one, until that ends or the input does."""
    prctl(PR_SET_PDEATHSIG, 0)  # it outlives who has started it for as long as ending all takes
    os.setpgid(0, 0)
    adopt_orphans()
    if network := os.environ.pop(NETWORK, ""):
        enter(network)
    if pid := os.fork():
        watch(pid)
    else:
        fork_what_is_spawned()
        import_module(ENTRY).main()


def enter(network: str) -> None:
    """Move this process into a namespace, before it has a second thread."""
    with Path("/run/netns", network).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {network}")


def fork_what_is_spawned() -> None:
    """Begin a nursery, and have `multiprocessing` start its processes there."""
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        channel.close()
        nurse(theirs)
    theirs.close()
    exec_instead = util.spawnv_passfds

    def forked(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        code = args[args.index("-c") + 1]
        if "spawn_main" not in code:  # the resource tracker imports nothing
            return exec_instead(path, args, passfds)
        request = {
            "code": code,
            "env": dict(os.environ),
            "fds": list(passfds),
            "parent": os.getpid(),
        }
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(channel, [json.dumps(request).encode()], list(passfds))
            return int(channel.recv(16))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)

    util.spawnv_passfds = forked


def nurse(channel: socket.socket) -> None:
    """Fork until the parent has ended; a new process is the parent's child, and never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        text, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 64)
        if not text:
            end_at_once()
        if (between := os.fork()) == 0:
            if os.fork():
                end_at_once()
            request = json.loads(text)
            while os.getppid() != request["parent"]:
                os.sched_yield()
            channel.send(str(os.getpid()).encode())
            channel.close()
            live(request, fds)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def live(request: dict[str, Any], fds: Sequence[int]) -> None:
    """What a Python that was spawned does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    if places := os.environ.get("OMP_PLACES"):  # libgomp has read it long ago
        os.sched_setaffinity(0, [int(core) for core in places.strip("{}").split(",")])
    high = [os.dup2(fd, ABOVE_ALL_OTHERS + at) for at, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, request["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["-c", "--multiprocessing-fork"]
    fork_what_is_spawned()
    exec(request["code"], {})  # noqa: S102 - it is what `multiprocessing` would have Python run
