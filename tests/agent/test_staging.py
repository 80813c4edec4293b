"""The staging memory of an agent, whichever side it is on."""

import asyncio
import uuid
from typing import Any

import pytest

from kvbus.agent import AgentConfig, SlotMemory, convert_config
from kvbus.errors import ClosedError, ConfigError, GeometryError
from kvbus.transport import Transport

SETTINGS: dict[str, Any] = {
    "agent_id": "agent",
    "peer_bind": "tcp://127.0.0.1:0",
    "events_bind": "tcp://127.0.0.1:0",
}


@pytest.mark.anyio
async def test_staging_memory_is_deregistered_before_it_is_given_back() -> None:
    transport = Transport(f"prefill/{uuid.uuid4().hex}")
    await asyncio.wrap_future(transport.start())
    try:
        staging = await SlotMemory.open(transport, num_slots=3, slot_bytes=4096)
        with pytest.raises(GeometryError, match="slot 3 of 3 slots"):
            staging.address(3)
        apart = staging.address(2) - staging.address(0)
        registered_bytes = transport.stats().registered_bytes
        await staging.close()

        assert apart == 2 * 4096
        assert (registered_bytes, transport.stats().registered_bytes) == (3 * 4096, 0)
        with pytest.raises(ClosedError):
            staging.address(0)
    finally:
        await asyncio.wrap_future(transport.close(timeout_s=2.0))


def test_staging_memory_smaller_than_a_slot_is_refused_with_both_keys() -> None:
    fields = {**SETTINGS, "staging_bytes": 4096, "slot_bytes": 8192}

    with pytest.raises(ConfigError, match=r"'staging_bytes': 4096 .* 'slot_bytes' = 8192"):
        convert_config(AgentConfig, fields, source="the test")
