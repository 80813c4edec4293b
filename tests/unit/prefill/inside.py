"""A prefill agent whose control process is the test's."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from kvbus.agent.config import convert_config
from kvbus.agent.local_engine import EngineProcess, LocalEngine
from kvbus.agent.runtime import Runtime
from kvbus.bus import BusContext, RequestClient, new_boot_id, new_context
from kvbus.geometry import EngineSpec
from kvbus.memory.mapping import PassedFile
from kvbus.protocol import AgentRole, R, Request
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.prefill_service import PrefillService
from tests.support.agents import until
from tests.support.engines import Engine, engine
from tests.support.inside_agents import BINDS, inside_agent

WITHIN_S = 30.0
SETTINGS: dict[str, Any] = {
    "agent_id": "prefill",
    **BINDS,
    "late_read_s": 0.01,
    "engine_wait_s": 0.0,
    "staging_bytes": 4 * 65536,
    "slot_bytes": 65536,
}


def given_back(process: EngineProcess) -> bool:
    passed = process.segments.passed.values()
    memories = process.engine.ranks.values() if process.engine is not None else ()
    files_closed = all(one.is_closed for one in passed if isinstance(one, PassedFile))
    return files_closed and all(
        one.defined.is_removed and not one.defined.num_jobs for one in memories
    )


@dataclass
class Reader:
    client: RequestClient

    async def ask(self, message: Request[R]) -> R:
        return await self.client.request(message, timeout_s=WITHIN_S)


@dataclass
class PrefillAgent:
    runtime: Runtime
    config: PrefillConfig
    context: BusContext

    @property
    def attach(self) -> Path:
        return self.config.attach_path

    @property
    def memory_socket(self) -> Path:
        return self.config.runtime_path / "memory.sock"

    @property
    def boot(self) -> str:
        return self.runtime.agent.identity.agent_boot

    @property
    def data_pid(self) -> int:
        return self.runtime.agent.data.status().pid

    def read(self, address: int, num_bytes: int) -> bytes:
        """Read bytes of the data process."""
        with Path(f"/proc/{self.data_pid}/mem").open("rb") as memory:
            return os.pread(memory.fileno(), num_bytes, address)

    @property
    def counts(self) -> dict[str, int]:
        return self.runtime.service.counts()

    def local(self, source: Engine) -> LocalEngine:
        return self.runtime.agent.engines.engines[source.spec.engine_id]

    @asynccontextmanager
    async def engine(self, spec: EngineSpec | None = None, **shape: Any) -> AsyncIterator[Engine]:
        async with engine(self.attach, spec, seed=1, **shape) as source:
            processes = list(self.local(source).processes)
            yield source
        await until(lambda: all(given_back(process) for process in processes))

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[Reader]:
        endpoint = self.runtime.agent.identity.peer_endpoint
        client = RequestClient(self.context, endpoint, boot=new_boot_id())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            yield Reader(client)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def prefill_agent(folder: Path, **settings: Any) -> AsyncIterator[PrefillAgent]:
    fields = {**SETTINGS, "runtime_dir": str(folder / "run"), **settings}
    config = convert_config(PrefillConfig, fields, source="the test")
    with new_context() as context:
        async with inside_agent(
            AgentRole.PREFILL, config, lambda agent: PrefillService(agent, config), context
        ) as runtime:
            yield PrefillAgent(runtime, config, context)
