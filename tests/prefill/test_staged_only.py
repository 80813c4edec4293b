"""A prefill agent with memory that NIXL is not told of: what it says of it, and how it ends."""

from pathlib import Path

import pytest
import torch

from kvbus.protocol.peer import HandshakeDone
from tests.memories import Memory
from tests.prefill.inside import SETTINGS, PrefillAgent, prefill_agent
from tests.prefill.leases import handshake, leased

pytestmark = pytest.mark.anyio

STAGED = Memory(direct=False)


async def test_nixl_is_told_of_the_slots_alone(agent: PrefillAgent) -> None:
    async with (
        agent.engine(memory=STAGED) as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):
        done = await reader.ask(handshake(case), HandshakeDone)
        packed = await case.packed()
        registered_bytes = agent.runtime.transport.stats().registered_bytes

        assert done.memory.addresses == ({},)
        assert registered_bytes == SETTINGS["staging_bytes"]
        assert torch.equal(case.slot(packed), case.wanted())


async def test_its_addresses_go_without_waiting_for_late_reads(folder: Path) -> None:
    async with prefill_agent(folder, late_read_s=86_400) as agent:
        async with agent.engine(memory=STAGED) as source:  # its end waits until they are gone
            mapped = [len(process.segments.mappings) for process in agent.local(source).processes]

        assert sum(mapped) == 1
