"""Fixtures of the memory tests: an attach server and a client, children, a look at the kernel."""

import os
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

import hatch_build
import kvbus
from kvbus.memory.attach import AttachClient, AttachConnection, AttachServer


@pytest.fixture
def num_open_fds() -> Callable[[], int]:
    return lambda: len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def holders_of() -> Callable[[str], list[str]]:
    """Who in the whole machine has a memfd of that name open or mapped."""

    def targets(process: Path) -> Iterator[str]:
        with suppress(OSError):  # it ended meanwhile
            yield from (process / "maps").read_text().splitlines()
            for fd in (process / "fd").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    yield str(fd.readlink())

    def holders(name: str) -> list[str]:
        return [
            f"{process.name}: {target}"
            for process in Path("/proc").glob("[0-9]*")
            for target in targets(process)
            if name in target
        ]

    return holders


class RecordedServer:
    """A server and what it was told: its handler answers ``{"seen": number of fds}``."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.messages: list[tuple[dict[str, Any], int]] = []
        self.closed: list[AttachConnection] = []
        self.one_closed = anyio.Event()
        self.stopped = anyio.CancelScope()
        on_message = options.pop("on_message", self._answer)
        self.server = AttachServer(path, on_message, self._note_closed, **options)

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Serve until ``stopped.cancel()``, while the test goes on."""
        with self.stopped:
            await self.server.serve(task_status=task_status)

    async def _answer(
        self, _connection: AttachConnection, message: dict[str, Any], fds: list[int]
    ) -> dict[str, Any]:
        self.messages.append((message, len(fds)))
        return {"seen": len(fds)}

    def _note_closed(self, connection: AttachConnection) -> None:
        self.closed.append(connection)
        self.one_closed.set()


HAS_COMPILER = shutil.which(shlex.split(os.environ.get("CC") or "cc")[0]) is not None


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_COMPILER:
        pytest.skip("there is no C compiler here")
    library = tmp_path_factory.mktemp("kernel") / "copy_runs.so"
    assert hatch_build.compile_kernel(library) is None
    return library


Serving = Callable[..., AbstractAsyncContextManager[RecordedServer]]
Attached = Callable[..., AbstractAsyncContextManager[tuple[RecordedServer, AttachClient]]]


@pytest.fixture
def serving(folder: Path) -> Serving:
    """``async with serving(**options) as recorded``: a server at ``attach.sock``."""

    @asynccontextmanager
    async def serve(**options: Any) -> AsyncIterator[RecordedServer]:
        recorded = RecordedServer(folder / "attach.sock", **options)
        async with anyio.create_task_group() as tasks:
            await tasks.start(recorded.run)
            yield recorded
            tasks.cancel_scope.cancel()

    return serve


@pytest.fixture
def attached(serving: Serving) -> Attached:
    """``async with attached(**options) as (recorded, client)``: a server and one client of it."""

    @asynccontextmanager
    async def attach(**options: Any) -> AsyncIterator[tuple[RecordedServer, AttachClient]]:
        async with serving(**options) as recorded, AttachClient(recorded.server.path) as client:
            yield recorded, client

    return attach


@pytest.fixture
def null_fd() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def child_command() -> Callable[..., list[str]]:
    """The command line that runs ``processes/<name>.py`` with this kvbus."""

    def command(name: str, *arguments: object) -> list[str]:
        script = Path(__file__).parent / "processes" / f"{name}.py"
        repository = Path(kvbus.__file__).parents[1]
        environment = ["env", f"PYTHONPATH={repository}"]
        return [*environment, sys.executable, str(script), *map(str, arguments)]

    return command
