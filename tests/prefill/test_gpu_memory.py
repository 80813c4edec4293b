"""A prefill agent with memory of a GPU, all but the CUDA calls real: slots, copies, and the end."""

from pathlib import Path

import anyio
import pytest
import torch

from kvbus.engine import PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.protocol import HandshakeDone
from tests.agents import until
from tests.gpu_stand_in import GPU, StandIn, engine_on, gpu
from tests.prefill.conftest import HeldUp
from tests.prefill.inside import SETTINGS, PrefillAgent, prefill_agent
from tests.prefill.leases import handshake, lease, leased

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]


async def test_a_box_is_gathered_on_the_stream_into_a_slot_of_the_gpu(
    agent: PrefillAgent, gpu: StandIn
) -> None:
    async with (
        engine_on(gpu, PrefillSession, agent.attach, seed=1) as source,
        agent.reader() as reader,
        leased(agent, source, reader) as case,
    ):
        done = await reader.ask(handshake(case), HandshakeDone)
        packed = await case.packed()
        (slots,) = gpu.slots
        number = (packed.address - slots.address(0)) // slots.slot_bytes
        content = slots.tensor(number)[: packed.num_bytes]

        assert torch.equal(content, case.wanted())
        assert gpu.num_copies == 1
        assert gpu.events == [(bytes(64),)]
        assert done.memory.addresses == ({},)
        assert agent.runtime.agent.staging.registrations(case.local.devices) == [slots.registration]
        assert case.local.devices == {GPU}


async def test_all_engines_of_a_gpu_share_its_slots(agent: PrefillAgent, gpu: StandIn) -> None:
    async with (
        engine_on(gpu, PrefillSession, agent.attach, seed=1) as one,
        engine_on(gpu, PrefillSession, agent.attach, seed=2) as other,
    ):
        places = [agent.local(source).devices for source in (one, other)]

        assert places == [{GPU}, {GPU}]
        assert len(gpu.slots) == 1
        registered_bytes = agent.runtime.transport.stats().registered_bytes
        assert registered_bytes == 2 * SETTINGS["staging_bytes"]


async def test_it_is_closed_when_the_engine_ends_and_late_reads_are_not_waited_for(
    folder: Path, gpu: StandIn
) -> None:
    async with prefill_agent(folder, late_read_s=86_400) as agent:
        async with engine_on(gpu, PrefillSession, agent.attach, seed=1):
            num_open = gpu.num_open
        await until(lambda: not gpu.num_open)

        assert num_open == 1


async def test_it_is_not_closed_under_a_copy(folder: Path, gpu: StandIn, held_up: HeldUp) -> None:
    refusals: list[RequestRefused] = []
    async with (
        prefill_agent(folder, late_read_s=86_400) as agent,
        agent.reader() as reader,
        anyio.create_task_group() as tasks,
    ):
        async with engine_on(gpu, PrefillSession, agent.attach, seed=1) as source:
            _, case = await lease(agent, source, reader)

            async def note() -> None:
                refusals.append(await case.refusal())

            tasks.start_soon(note)
            await held_up.wait_begun()
        await until(lambda: refusals)
        await anyio.wait_all_tasks_blocked()
        num_open = gpu.num_open
        held_up.may_end.set()
        await until(lambda: not gpu.num_open)

    assert num_open == 1
    assert refusals[0].code is ErrorCode.ENGINE_LOST


async def test_a_handle_that_does_not_open_is_refused_and_nothing_is_kept(
    agent: PrefillAgent, gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "memory", _Forgetful())
    with pytest.raises(RequestRefused, match="no such handle") as refused:
        async with engine_on(gpu, PrefillSession, agent.attach, seed=1):
            pass

    assert refused.value.code is ErrorCode.SEGMENT
    assert gpu.num_open == 0


class _Forgetful(dict[bytes, torch.Tensor]):
    """Of what is put there nothing is found."""

    def __contains__(self, _handle: object) -> bool:
        return False
