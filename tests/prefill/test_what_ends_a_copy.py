"""What can come in between while a box is copied: its lease, its engine or its agent ends."""

from pathlib import Path

import anyio
import pytest

from kvbus.agent.copiers import Copiers
from kvbus.agent.engine import LocalEngine
from kvbus.errors import ErrorCode, RequestRefused
from tests.agents import until
from tests.engines import engine
from tests.gpu_stand_in import StandIn, engine_on, gpu
from tests.memories import Memory
from tests.prefill.conftest import HeldUp
from tests.prefill.inside import WITHIN_S, PrefillAgent, given_back, prefill_agent
from tests.prefill.leases import Case, lease

pytestmark = pytest.mark.anyio
__all__ = ["gpu"]


async def note_refusal(case: Case, refusals: list[RequestRefused]) -> None:
    refusals.append(await case.refusal())


async def test_digests_of_an_offer_that_ends_while_they_are_made_are_refused(
    case: Case, held_up_digests: HeldUp
) -> None:
    """Its blocks may have other bytes by then."""
    refusals: list[RequestRefused] = []

    async def ask() -> None:
        with pytest.raises(RequestRefused) as refused:
            await case.reader.ask(case.digest())
        refusals.append(refused.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await held_up_digests.wait_begun()
        await case.take()
        held_up_digests.may_end.set()

    assert refusals[0].code is ErrorCode.OFFER_COMPLETED


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "unregistered"])
async def test_the_memory_of_a_dead_engine_stays_while_a_copy_reads_it(
    agent: PrefillAgent, held_up: HeldUp, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    retiring, quiesce = anyio.Event(), Copiers.quiesce

    async def noted_quiesce(copiers: Copiers, engine: LocalEngine) -> None:
        retiring.set()
        await quiesce(copiers, engine)

    monkeypatch.setattr(Copiers, "quiesce", noted_quiesce)
    refusals: list[RequestRefused] = []
    async with agent.reader() as reader, anyio.create_task_group() as tasks:
        memory = Memory(direct=direct)
        async with engine(agent.attach, memory=memory, seed=1) as source:
            _, case = await lease(agent, source, reader)
            processes = list(case.local.processes)
            tasks.start_soon(note_refusal, case, refusals)
            await held_up.wait_begun()
        await until(lambda: refusals)
        with anyio.fail_after(WITHIN_S):
            await retiring.wait()
        await anyio.wait_all_tasks_blocked()
        unmapped = [process.segments.unmapped for process in processes]
        held_up.may_end.set()

        await until(lambda: all(given_back(process) for process in processes))
        await until(lambda: not agent.counts["slots"])
    assert refusals[0].code is ErrorCode.ENGINE_LOST
    assert not any(unmapped)


async def test_memory_of_a_gpu_is_closed_after_the_copy_and_waits_for_no_late_read(
    folder: Path, gpu: StandIn, held_up: HeldUp
) -> None:
    refusals: list[RequestRefused] = []
    async with (
        prefill_agent(folder, late_read_s=86_400) as agent,
        agent.reader() as reader,
        anyio.create_task_group() as tasks,
    ):
        async with engine_on(gpu, agent.attach, seed=1) as source:
            _, case = await lease(agent, source, reader)
            tasks.start_soon(note_refusal, case, refusals)
            await held_up.wait_begun()
        await until(lambda: refusals)
        await anyio.wait_all_tasks_blocked()
        num_open = gpu.num_open
        held_up.may_end.set()
        await until(lambda: not gpu.num_open)

    assert num_open == 1
    assert refusals[0].code is ErrorCode.ENGINE_LOST
