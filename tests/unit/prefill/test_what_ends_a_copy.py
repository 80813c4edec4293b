"""What can come in between while a tile is copied: its lease, its engine or its agent ends."""

from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from kvbus.errors import ErrorCode, RequestRefused
from tests.support.agents import until
from tests.support.engines import engine
from tests.support.gpu_stand_in import StandIn, engine_on, gpu
from tests.support.memories import Memory
from tests.unit.prefill.conftest import held_up
from tests.unit.prefill.inside import PrefillAgent, given_back, prefill_agent
from tests.unit.prefill.leases import Case, lease

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]


async def note_refusal(case: Case, refusals: list[RequestRefused]) -> None:
    refusals.append(await case.refusal())


async def test_digests_are_refused_if_offer_ends_while_they_are_made(
    case: Case,
) -> None:
    """Its blocks may have other bytes by then."""
    refusals: list[RequestRefused] = []

    async def ask() -> None:
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(case.digest())
        refusals.append(refused.value)

    with held_up(case.agent) as held:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await held.wait_begun()
            await case.take()
            held.go_on()

    assert refusals[0].code is ErrorCode.OFFER_COMPLETED


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "unregistered"])
async def test_the_memory_of_a_dead_engine_stays_while_a_copy_reads_it(
    agent: PrefillAgent, direct: bool
) -> None:
    refusals: list[RequestRefused] = []
    async with agent.reader() as reader, anyio.create_task_group() as tasks:
        with ExitStack() as stack:
            async with engine(agent.attach, memory=Memory(direct=direct), seed=1) as source:
                _, case = await lease(agent, source, reader)
                held = stack.enter_context(held_up(agent))
                processes = list(case.local.processes)
                tasks.start_soon(note_refusal, case, refusals)
                await held.wait_begun()
            await until(lambda: refusals)
            slots, kept = agent.counts["slots"], not any(map(given_back, processes))
            held.go_on()
        await until(lambda: all(map(given_back, processes)))
        await until(lambda: not agent.counts["slots"])
    assert refusals[0].code is ErrorCode.ENGINE_LOST
    assert (slots, kept) == (1, True)


async def test_gpu_memory_closes_after_copy_and_awaits_no_late_read(
    folder: Path, gpu: StandIn
) -> None:
    refusals: list[RequestRefused] = []
    async with (
        prefill_agent(folder, late_read_s=86_400) as agent,
        agent.reader() as reader,
        anyio.create_task_group() as tasks,
    ):
        async with engine_on(gpu, agent.attach, seed=1) as source:
            _, case = await lease(agent, source, reader)
            gpu.may_copy.clear()
            tasks.start_soon(note_refusal, case, refusals)
            await until(lambda: gpu.num_copies)
        await until(lambda: refusals)
        num_open = gpu.num_open
        gpu.may_copy.set()
        await until(lambda: not gpu.num_open)

    assert num_open == 1
    assert refusals[0].code is ErrorCode.ENGINE_LOST
