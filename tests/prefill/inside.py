"""A prefill agent inside the test's process, so that a test can hold a copy up in its thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from kvbus.agent.engines.local_engine import EngineProcess, LocalEngine
from kvbus.agent.process.config import convert_config
from kvbus.agent.process.runtime import Runtime
from kvbus.agent.staging.devices import StagingDevices
from kvbus.bus import BusContext, RequestClient, new_boot_id, new_context
from kvbus.engine import PrefillSession
from kvbus.geometry import EngineSpec
from kvbus.memory.attach.seat import Seat
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.message import R, Request
from kvbus.transport import Transport
from kvbus_prefill.agent import PrefillService
from kvbus_prefill.config import PrefillConfig
from tests.agents import until
from tests.engines import Engine, engine
from tests.namespaces import EVERYWHERE

WITHIN_S = 30.0
SETTINGS: dict[str, Any] = {
    "agent_id": "prefill",
    "peer_bind": "tcp://127.0.0.1:0",
    "events_bind": "tcp://127.0.0.1:0",
    "late_read_s": 0.01,
    "staging_bytes": 4 * 65536,
    "slot_bytes": 65536,
}


def given_back(process: EngineProcess) -> bool:
    """Whether nothing of the process's memory is mapped here any more."""
    return all(mapping._pages is None for mapping in process.segments.mappings.values())


@dataclass
class Reader:
    """Asks as a decode agent does."""

    client: RequestClient

    async def ask(self, message: Request[R], reply: object = None) -> R:
        del reply  # the message knows it
        return await self.client.ask(message, timeout_s=WITHIN_S)


@dataclass
class PrefillAgent:
    """One agent that runs."""

    runtime: Runtime
    config: PrefillConfig
    context: BusContext

    @property
    def attach(self) -> Path:
        return self.config.attach_path

    @property
    def boot(self) -> str:
        return self.runtime.boot

    @property
    def counts(self) -> dict[str, int]:
        return self.runtime.service.counts()

    def local(self, source: Engine) -> LocalEngine:
        """The engine as the agent sees it."""
        return self.runtime.agent.engines.engines[source.spec.engine_id]

    @asynccontextmanager
    async def engine(self, spec: EngineSpec | None = None, **shape: Any) -> AsyncIterator[Engine]:
        """An engine, until the agent has given its memory back."""
        async with engine(PrefillSession, self.attach, spec, seed=1, **shape) as source:
            processes = list(self.local(source).processes)
            yield source
        await until(lambda: all(given_back(process) for process in processes))

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[Reader]:
        """A reader with a boot id of its own."""
        endpoint = self.runtime.agent.identity.peer_endpoint
        client = RequestClient(self.context, endpoint, boot=new_boot_id())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            yield Reader(client)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def prefill_agent(folder: Path, **settings: Any) -> AsyncIterator[PrefillAgent]:
    """An agent that has started, with everything real but the process."""
    fields = {**SETTINGS, "runtime_dir": str(folder / "run"), **settings}
    config = convert_config(PrefillConfig, fields, source="the test")
    boot, loop = new_boot_id(), asyncio.get_running_loop()
    transport = Transport(f"prefill/{boot}", deliver=loop.call_soon_threadsafe)
    await asyncio.wrap_future(transport.start())
    staging = await StagingDevices.open(config, transport)
    try:
        with new_context() as context, Seat.take(config.runtime_path) as seat:
            async with anyio.create_task_group() as tasks:
                runtime = Runtime(
                    AgentRole.PREFILL, config, boot, seat, transport, tasks, staging, EVERYWHERE
                )
                await runtime.start(context, lambda agent: PrefillService(agent, config))
                yield PrefillAgent(runtime, config, context)
                runtime.service.stop()
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await staging.close()
            await asyncio.wrap_future(transport.close(timeout_s=2.0))
