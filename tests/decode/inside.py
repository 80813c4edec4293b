"""A decode agent inside the test's process, with everything real but the process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from kvbus.agent.process.config import convert_config
from kvbus.agent.process.runtime import Runtime
from kvbus.agent.staging.devices import StagingDevices
from kvbus.bus import new_boot_id, new_context
from kvbus.memory.attach.seat import Seat
from kvbus.protocol.engine import AgentRole
from kvbus.transport import Transport
from kvbus_decode.agent import DecodeService
from kvbus_decode.config import DecodeConfig
from tests.namespaces import EVERYWHERE

SETTINGS: dict[str, Any] = {
    "agent_id": "decode",
    "peer_bind": "tcp://127.0.0.1:0",
    "events_bind": "tcp://127.0.0.1:0",
    "calibrate": False,
}


@asynccontextmanager
async def decode_agent(folder: Path, **settings: Any) -> AsyncIterator[Runtime]:
    """An agent that has started; its attach socket is at ``config.attach_path``."""
    fields = {**SETTINGS, "runtime_dir": str(folder / "run"), **settings}
    config = convert_config(DecodeConfig, fields, source="the test")
    boot, loop = new_boot_id(), asyncio.get_running_loop()
    transport = Transport(f"decode/{boot}", deliver=loop.call_soon_threadsafe)
    await asyncio.wrap_future(transport.start())
    staging = await StagingDevices.open(config, transport)
    try:
        with new_context() as context, Seat.take(config.runtime_path) as seat:
            async with anyio.create_task_group() as tasks:
                runtime = Runtime(
                    AgentRole.DECODE, config, boot, seat, transport, tasks, staging, EVERYWHERE
                )
                await runtime.start(context, lambda agent: DecodeService(agent, config))
                yield runtime
                runtime.service.stop()
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await staging.close()
            await asyncio.wrap_future(transport.close(timeout_s=2.0))
