"""Tests that run in processes of their own, whose CUDA driver is the fake.

A call that fails can lose a context for good, and a driver stays loaded. Where the machine has a
GPU, the same tests run on its driver too, unless they need what only the fake has.
"""

import importlib
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from tests.support.cuda import ROOT, World, fake_cuda_env, load
from tests.support.cuda.calls import Cuda
from tests.support.forked import Forked

WITHIN_S = 60.0
DRIVERS = ["fake", *(["card"] if Path("/dev/nvidiactl").exists() else [])]
Body = Callable[..., None]
"""It takes a `Cuda`, and a `Beside` if there are two processes."""


class Beside:
    """The other process of a test."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, *what: Any, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self._sock, [pickle.dumps(what)], fds)

    def receive(self) -> Any:
        return self.receive_fds()[0]

    def receive_fds(self) -> tuple[Any, list[int]]:
        content, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 16)
        assert content, "the other process has ended"
        what = pickle.loads(content)  # noqa: S301  # from this test's own process
        return what[0] if len(what) == 1 else what, fds

    def has_ended(self, within_s: float = 0) -> bool:
        return bool(select.select([self._sock], [], [], within_s)[0])


class ForkedCase(Forked):
    imported = ("pytest", "numpy", __name__)


def apart(
    beside: Body | None = None, *, only_fake: bool = False, old_driver: bool = False, **options: Any
) -> Callable[[Body], Callable[..., None]]:
    """Run the body of a test apart, and ``beside`` in a second process; options are the fake's."""

    def decorate(body: Body) -> Callable[..., None]:
        drivers = ["old"] if old_driver else ["fake"] if only_fake or options else DRIVERS

        @pytest.mark.parametrize("driver", drivers)
        def test(driver: str, tmp_path: Path) -> None:
            env = dict(os.environ)
            if driver != "card":
                world = World(tmp_path / "world")
                env = fake_cuda_env(world=world, old_driver=driver == "old", **options)
            run_together([body, *filter(None, [beside])], driver, env)

        vars(test)["body"] = body
        return test

    return decorate


def run_together(bodies: Sequence[Body], driver: str, env: dict[str, str]) -> None:
    """The first must succeed; another may have been killed."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = [tempfile.TemporaryFile("w+") for _ in bodies]  # noqa: SIM115  # `_content` closes it
    started = [
        ForkedCase(
            [sys.executable, "-m", __name__, driver, _module_of(body), body.__name__],
            stdin=end,
            stderr=error,
            env=env,
        )
        for body, end, error in zip(bodies, ends, errors, strict=False)
    ]
    for end in ends:
        end.close()
    try:
        statuses = [process.wait(WITHIN_S) for process in started]
    finally:
        for process in started:
            process.kill()
    text = "\n".join(map(_content, errors))
    assert statuses[0] == 0, text
    assert all(status in (0, -signal.SIGKILL) for status in statuses[1:]), text


def _module_of(body: Body) -> str:
    """Its whole name, which pytest shortens to that in the outermost package."""
    path = Path(body.__code__.co_filename).relative_to(ROOT)
    return ".".join(path.with_suffix("").parts)


def _content(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.001)


def main() -> None:
    """Run a body, as an argument names it; its stdin is the socket of the other one."""
    _, driver, module, name = sys.argv
    if driver != "card":
        load(old_driver=driver == "old")
    found = getattr(importlib.import_module(module), name)
    body = getattr(found, "body", found)
    given = Cuda(), Beside(socket.socket(fileno=os.dup(0)))
    body(*given[: body.__code__.co_argcount])
