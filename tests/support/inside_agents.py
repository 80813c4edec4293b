"""An agent in the process of the test, with a real data process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any

import anyio
import pytest

from kvbus.agent.config import AgentConfig
from kvbus.agent.data_plane import UCX_INTERFACES
from kvbus.agent.runtime import Runtime, ServiceFactory
from kvbus.bus import BusContext, new_boot_id
from kvbus.data.channel import channel_to_data
from kvbus.data.child import spawner
from kvbus.data.client import DataProcess, OnExit, OnMessage, Spawn
from kvbus.data.loop import DataLoop
from kvbus.data.messages import ToData
from kvbus.errors import ClosedError
from kvbus.memory.bus_errors import BusErrors
from kvbus.protocol import AgentRole

BINDS = {"peer_bind": "tcp://127.0.0.1:0", "events_bind": "tcp://127.0.0.1:0"}
INTERFACE = "lo"


@asynccontextmanager
async def inside_agent(
    role: AgentRole, config: AgentConfig, make_service: ServiceFactory, context: BusContext
) -> AsyncIterator[Runtime]:
    with _ucx_on_loopback(), ExitStack() as memory:
        data = DataProcess(
            spawner(asyncio.get_running_loop()),
            new_boot=new_boot_id,
            name=config.agent_id,
            slice_bytes=config.slice_bytes,
            copy_threads=config.copy_threads,
            backends=config.backends,
        )
        try:
            async with anyio.create_task_group() as tasks:
                runtime = await Runtime.start(
                    role,
                    config,
                    make_service,
                    boot=new_boot_id(),
                    context=context,
                    tasks=tasks,
                    data=data,
                    interfaces=(INTERFACE,),
                )
                engines = runtime.agent.engines
                engines.new_segments = partial(_closed_with, memory, engines.new_segments)
                yield runtime
                runtime.service.stop()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await data.close()


def _closed_with(memory: ExitStack, make: Callable[..., Any], **arguments: Any) -> Any:
    """Make segments that end with ``memory``: the agent may end before it frees them."""
    segments = make(**arguments)
    memory.callback(segments.close)
    return segments


def thread_spawner(loop: asyncio.AbstractEventLoop) -> Spawn:
    return partial(DataThread, loop)


class DataThread:
    """A data process as a thread, for tests that replace its parts."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, _boot: str, on_message: OnMessage, on_exit: OnExit
    ) -> None:
        self._loop, self._on_message, self._on_exit = loop, on_message, on_exit
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = channel_to_data(self._ours)
        self.pid = os.getpid()
        loop.add_reader(self._ours, self._read)
        Thread(target=self._run, args=(theirs,), daemon=True).start()

    def send(self, message: ToData, fds: Sequence[int] = ()) -> None:
        self._channel.send(message, fds)

    def kill(self) -> None:
        self._loop.remove_reader(self._ours)
        self._channel.close()

    def _read(self) -> None:
        while (received := self._channel.receive()) is not None:
            self._on_message(received[0])

    def _run(self, theirs: socket.socket) -> None:
        with theirs, suppress(ClosedError):
            DataLoop(theirs, BusErrors()).run()
        self._loop.call_soon_threadsafe(self._on_exit, "killed")


@contextmanager
def _ucx_on_loopback() -> Iterator[None]:
    """Else it takes any link that another test has made, which the agent then refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UCX_INTERFACES, INTERFACE)
        yield
