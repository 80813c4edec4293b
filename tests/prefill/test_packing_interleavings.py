"""What can come in between while a box is copied: its lease, its engine or its agent ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from kvbus.agent import Copiers, LocalEngine
from kvbus.engine import PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from tests.agents import until
from tests.engines import engine
from tests.memories import Memory
from tests.prefill.conftest import HeldUp
from tests.prefill.inside import WITHIN_S, PrefillAgent, given_back
from tests.prefill.leases import Case, lease

pytestmark = pytest.mark.anyio


async def note_refusal(case: Case, refusals: list[RequestRefused]) -> None:
    refusals.append(await case.refusal())


@asynccontextmanager
async def being_packed(case: Case, held_up: HeldUp) -> AsyncIterator[list[RequestRefused]]:
    """A box whose copy has begun; the list has the refusal of it, once the context ends."""
    refusals: list[RequestRefused] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(note_refusal, case, refusals)
        await held_up.wait_begun()
        yield refusals


async def test_a_lease_that_ends_while_its_box_is_copied_refuses_it_at_once(
    case: Case, held_up: HeldUp
) -> None:
    async with being_packed(case, held_up) as refusals:
        await case.confirm()
        await until(lambda: refusals)
        in_use = case.agent.counts["slots"]
        held_up.may_end.set()

    await until(lambda: not case.agent.counts["slots"])
    assert refusals[0].code is ErrorCode.OFFER_COMPLETED
    assert in_use == 1


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "unregistered"])
async def test_the_memory_of_a_dead_engine_stays_while_a_copy_reads_it(
    agent: PrefillAgent, held_up: HeldUp, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    retiring, quiesce = anyio.Event(), Copiers.quiesce

    async def noted_quiesce(copiers: Copiers, engine: LocalEngine) -> None:
        retiring.set()
        await quiesce(copiers, engine)

    monkeypatch.setattr(Copiers, "quiesce", noted_quiesce)
    async with agent.reader() as reader, anyio.create_task_group() as tasks:
        memory = Memory(direct=direct)
        async with engine(PrefillSession, agent.attach, memory=memory, seed=1) as source:
            _, case = await lease(agent, source, reader)
            processes = list(case.local.processes)
            refusals: list[RequestRefused] = []
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


async def test_an_agent_that_stops_refuses_the_box_that_is_copied(
    case: Case, held_up: HeldUp
) -> None:
    async with being_packed(case, held_up) as refusals:
        case.agent.runtime.service.stop()
        await until(lambda: refusals)
        held_up.may_end.set()

    assert refusals[0].code is ErrorCode.CLOSED
