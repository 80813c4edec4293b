"""A decode agent inside the test's process, with everything real but the process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvbus.agent.process.config import convert_config
from kvbus.agent.process.runtime import Runtime
from kvbus.bus import new_context
from kvbus.protocol import AgentRole
from kvbus_decode.agent import DecodeService
from kvbus_decode.config import DecodeConfig
from tests.inside_agents import BINDS, inside_agent

SETTINGS: dict[str, Any] = {
    "agent_id": "decode",
    **BINDS,
    "calibrate": False,
}


@asynccontextmanager
async def decode_agent(folder: Path, **settings: Any) -> AsyncIterator[Runtime]:
    """An agent that has started; its attach socket is at ``config.attach_path``."""
    fields = {**SETTINGS, "runtime_dir": str(folder / "run"), **settings}
    config = convert_config(DecodeConfig, fields, source="the test")
    with new_context() as context:
        async with inside_agent(
            AgentRole.DECODE, config, lambda agent: DecodeService(agent, config), context
        ) as runtime:
            yield runtime
