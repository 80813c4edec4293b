"""Fixtures of the memory tests: a runtime directory, an attach server, a look at the kernel."""

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

import kvbus
from kvbus.memory.attach import AttachConnection, AttachServer


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short path of mode 0700: pytest's own are too long for socket addresses."""
    directory = Path(tempfile.mkdtemp(prefix="kvbus-"))
    yield directory
    shutil.rmtree(directory)


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


Serving = Callable[..., AbstractAsyncContextManager[RecordedServer]]


@pytest.fixture
def serving(runtime_dir: Path) -> Serving:
    """``async with serving(**options) as recorded``: a server at ``attach.sock``."""

    @asynccontextmanager
    async def serve(**options: Any) -> AsyncIterator[RecordedServer]:
        recorded = RecordedServer(runtime_dir / "attach.sock", **options)
        async with anyio.create_task_group() as tasks:
            await tasks.start(recorded.run)
            yield recorded
            tasks.cancel_scope.cancel()

    return serve


@pytest.fixture
def child_command() -> Callable[..., list[str]]:
    """The command line that runs ``processes/<name>.py`` with this kvbus."""

    def command(name: str, *arguments: object) -> list[str]:
        script = Path(__file__).parent / "processes" / f"{name}.py"
        repository = Path(kvbus.__file__).parents[1]
        environment = ["env", f"PYTHONPATH={repository}"]
        return [*environment, sys.executable, str(script), *map(str, arguments)]

    return command
