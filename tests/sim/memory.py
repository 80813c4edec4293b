"""The memory sockets of a machine: prefill agents lend there, and decode agents map for real."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anyio
from anyio.abc import TaskStatus

from kvbus.errors import KVBusError, PeerLost
from tests.sim.world import SimLoop, World


class MemorySockets:
    """Sockets by their paths; a connection is both of its ends, and ends with either process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[Path, _Server] = {}
        self.connections: list[_Connection] = []

    def names(self) -> dict[str, dict[str, Any]]:
        """Replacements of names, by module."""
        return {
            "kvbus_prefill.lending": {"AttachServer": partial(_Server, self)},
            "kvbus_decode.mapped": {
                "FrameChannel": partial(_Connection, self),
                "connect_to_agent": self.servers.get,
                "check_folder": lambda _: None,
            },
        }

    def end_process(self, loop: SimLoop) -> None:
        for one in [one for one in self.connections if loop in (one.loop, one.server.loop)]:
            one.shut_down()


class _Server:
    """Stands for an attach server that lends."""

    def __init__(
        self,
        sockets: MemorySockets,
        path: Path,
        on_message: Callable[..., Awaitable[Any]],
        on_closed: Callable[["_Connection"], object],
        **_: Any,
    ) -> None:
        self.path, self.loop = path, asyncio.get_running_loop()
        self.on_message, self.on_closed = on_message, on_closed
        self._sockets = sockets

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        self._sockets.servers[self.path] = self
        task_status.started()
        await anyio.sleep_forever()


class _Connection:
    def __init__(self, sockets: MemorySockets, server: _Server | None) -> None:
        """Raises `PeerLost` when no agent listens."""
        if server is None or (isinstance(server.loop, SimLoop) and server.loop.is_dead):
            raise PeerLost("no agent listens")
        self.loop, self.server = asyncio.get_running_loop(), server
        self._sockets = sockets
        self._ended = self.loop.create_future()
        sockets.connections.append(self)

    async def request(self, message: Any) -> Any:
        answered: asyncio.Future[Any] = self.loop.create_future()
        self.server.loop.call_soon(self._start, message, answered)
        await asyncio.wait([answered, self._ended], return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise anyio.EndOfStream
        return answered.result()

    async def receive(self) -> NoReturn:
        await asyncio.shield(self._ended)
        raise anyio.EndOfStream

    def shut_down(self) -> None:
        if self in self._sockets.connections:
            self._sockets.connections.remove(self)
            self.server.loop.call_soon(self.server.on_closed, self)
            self.loop.call_soon(self._end)

    close = shut_down

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _start(self, message: Any, answered: "asyncio.Future[Any]") -> None:
        if self in self._sockets.connections:
            self.server.loop.create_task(self._answer(message, answered))

    async def _answer(self, message: Any, answered: "asyncio.Future[Any]") -> None:
        settle: Callable[[], object]
        try:
            answer = await self.server.on_message(self, message, [])
            settle = partial(answered.set_result, (answer.ok, list(answer.fds)))
        except KVBusError as error:
            settle = partial(answered.set_exception, error)

        def arrive() -> None:
            if not answered.done():
                settle()

        self._sockets.world.after(0.0, self.loop.call_soon, arrive)
