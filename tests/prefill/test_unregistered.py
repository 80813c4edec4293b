"""A prefill agent with memory that NIXL is not told of: what it says of it, and how it ends."""

from pathlib import Path

import pytest
import torch

from kvbus.agent import SlotMemory
from kvbus.protocol import Empty, HandshakeDone, Unpack
from kvbus.transport import Registration
from tests.agents import until
from tests.memories import Memory
from tests.prefill.inside import SETTINGS, PrefillAgent, prefill_agent
from tests.prefill.leases import Case, handshake, leased

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


async def test_an_agent_that_exposes_only_staging_registers_and_keeps_nothing_else(
    folder: Path,
) -> None:
    async with (
        prefill_agent(folder, exposure="staging") as agent,
        agent.engine() as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):
        done = await reader.ask(handshake(case), HandshakeDone)
        packed = await case.packed()
        registered_bytes = agent.runtime.transport.stats().registered_bytes
        packed_right = torch.equal(case.slot(packed), case.wanted())
        unpack = Unpack(agent_boot=agent.boot, slot_ids=(packed.slot_id,))
        await reader.ask(unpack, Empty)
        await until(lambda: agent.counts["slots"] == 0)

        assert done.memory.addresses == ({},)
        assert registered_bytes == SETTINGS["staging_bytes"]
        assert packed_right
        assert not case.slot(packed).any()


async def test_its_addresses_go_without_waiting_for_late_reads(folder: Path) -> None:
    async with prefill_agent(folder, late_read_s=86_400) as agent:
        async with agent.engine(memory=STAGED) as source:  # its end waits until they are gone
            mapped = [len(process.segments.mappings) for process in agent.local(source).processes]

        assert sum(mapped) == 1


async def test_boxes_of_a_device_lie_in_the_slots_of_that_device(
    agent: PrefillAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = agent.runtime.agent.staging
    shape = {"num_slots": devices.num_slots, "slot_bytes": devices.slot_bytes}
    there = await SlotMemory.open(agent.runtime.transport, **shape)
    monkeypatch.setitem(devices._slots, "there", there)
    there.memory, there.device = "VRAM", 5
    async with (
        agent.engine(memory=STAGED) as source,
        agent.engine() as other,
        agent.reader() as reader,
    ):
        agent.local(source).ranks[0].device = "there"
        async with (
            leased(agent, source, reader) as case,
            leased(agent, other, reader) as here,
        ):
            packed = [await case.packed(), await here.packed(), await case.packed()]
            in_use = agent.counts["slots"]
            blobs = [
                (await reader.ask(handshake(one), HandshakeDone)).nixl_metadata
                for one in (case, here)
            ]
            unpack = Unpack(
                agent_boot=agent.boot, slot_ids=tuple(one.slot_id for one in packed[:2])
            )
            await reader.ask(unpack, Empty)
            left = agent.counts["slots"]
            wanted = case.wanted()
            await case.confirm()

            slots = [there.address(number) for number in range(there.num_slots)]
            assert [one.address in slots for one in packed] == [True, False, True]
            assert torch.equal(
                there.tensor(slots.index(packed[2].address))[: packed[2].num_bytes], wanted
            )
            assert len({one.slot_id for one in packed}) == 3
            kinds = [(one.memory, one.device) for one in packed]
            assert kinds == [("VRAM", 5), ("DRAM", 0), ("VRAM", 5)]
            assert (in_use, left, agent.counts["slots"]) == (3, 1, 0)
            assert [there.registration in _registrations(agent, one) for one in (case, here)] == [
                True,
                False,
            ]
            assert [len(blob) for blob in blobs] == [1, 1]
    await there.close()


def _registrations(agent: PrefillAgent, case: Case) -> list[Registration]:
    return agent.runtime.agent.staging.registrations(case.local.devices)
