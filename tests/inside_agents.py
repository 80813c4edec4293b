"""An agent inside the test's process, with everything real but the process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest

from kvbus.agent.config import AgentConfig
from kvbus.agent.data_plane import UCX_INTERFACES, DataPlane
from kvbus.agent.runtime import Runtime, ServiceFactory
from kvbus.agent.slots import StagingDevices
from kvbus.bus import BusContext, new_boot_id
from kvbus.protocol import AgentRole
from kvbus.transport import Transport

BINDS = {"peer_bind": "tcp://127.0.0.1:0", "events_bind": "tcp://127.0.0.1:0"}
INTERFACE = "lo"


@asynccontextmanager
async def inside_agent(
    role: AgentRole, config: AgentConfig, make_service: ServiceFactory, context: BusContext
) -> AsyncIterator[Runtime]:
    """An agent that has started, until the block ends."""
    boot, loop = new_boot_id(), asyncio.get_running_loop()
    with _ucx_on_loopback():
        transport = Transport(f"{role}-{boot}", deliver=loop.call_soon_threadsafe)
        await asyncio.wrap_future(transport.start())
        staging = await StagingDevices.open(config, transport)
        try:
            async with anyio.create_task_group() as tasks:
                runtime = Runtime(
                    role=role,
                    config=config,
                    boot=boot,
                    transport=transport,
                    tasks=tasks,
                    staging=staging,
                    data_plane=DataPlane((INTERFACE,), transport),
                )
                await runtime.start(context, make_service)
                yield runtime
                runtime.service.stop()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wrap_future(transport.close(timeout_s=2.0))
                staging.close()


@contextmanager
def _ucx_on_loopback() -> Iterator[None]:
    """Else it takes any link that another test has made, which the agent then refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UCX_INTERFACES, INTERFACE)
        yield
