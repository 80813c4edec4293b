"""Fixtures of the memory tests: an attach server, children, a kernel, a look at descriptors."""

import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

import hatch_build
import kvbus
from kvbus.memory.attach import AttachConnection, AttachServer

COMPILER = os.environ.get("CC") or "cc"
HAS_COMPILER = shutil.which(shlex.split(COMPILER)[0]) is not None


@pytest.fixture
def num_open_fds() -> Callable[[], int]:
    return lambda: len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def nothing_leaks(num_open_fds: Callable[[], int]) -> Iterator[None]:
    """This process has as many descriptors open as before the test."""
    before = num_open_fds()
    yield
    assert num_open_fds() == before


@pytest.fixture
def null_fd() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory)


@pytest.fixture(scope="session")
def library_without_avx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", f"{COMPILER} -DHAS_AVX=0")
        return compiled(tmp_path_factory)


def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_COMPILER:
        pytest.skip("there is no C compiler here")
    library = tmp_path_factory.mktemp("kernel") / "copy_runs.so"
    assert hatch_build.compile_kernel(library) is None
    return library


@pytest.fixture
def child_command() -> Callable[..., list[str]]:
    """The command line that runs ``processes/<name>.py`` with this kvbus."""

    def command(name: str, *arguments: object) -> list[str]:
        script = Path(__file__).parent / "processes" / f"{name}.py"
        environment = ["env", f"PYTHONPATH={Path(kvbus.__file__).parents[1]}"]
        return [*environment, sys.executable, str(script), *map(str, arguments)]

    return command


class Served:
    """A server, and all messages and ends that it has seen."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.messages: list[dict[str, Any]] = []
        self.closed: list[AttachConnection] = []
        self.one_closed = anyio.Event()
        self.stopped = anyio.CancelScope()
        on_message = options.pop("on_message", self._answer)
        self.server = AttachServer(path, on_message, self._note_closed, **options)

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        with self.stopped:
            await self.server.serve(task_status=task_status)

    async def _answer(self, _: Any, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        self.messages.append(message)
        return {"seen": len(fds)}

    def _note_closed(self, connection: AttachConnection) -> None:
        self.closed.append(connection)
        self.one_closed.set()


Serving = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def serve(path: Path, **options: Any) -> AsyncIterator[Served]:
    served = Served(path, **options)
    async with anyio.create_task_group() as tasks:
        await tasks.start(served.run)
        yield served
        tasks.cancel_scope.cancel()


@pytest.fixture
def serving(folder: Path) -> Serving:
    """``async with serving(**options) as served``: a server at ``attach.sock``."""
    return lambda **options: serve(folder / "attach.sock", **options)
