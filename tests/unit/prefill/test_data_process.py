"""A prefill agent outlives its data process, with its engines and offers; stale reads fail."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbus.data import messages as wire
from kvbus.data.child import spawner
from kvbus.data.client import DataProcessHandle
from kvbus.engine import Connection
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import lay_out_rank
from kvbus.protocol import PassSegment, Register
from tests.support import inside_agents
from tests.support.agents import until
from tests.support.engines import NUM_BLOCKS, engine, make_spec
from tests.support.memories import NHD, Memory
from tests.unit.prefill.inside import PrefillAgent, prefill_agent
from tests.unit.prefill.leases import Case, case_of, lease

pytestmark = pytest.mark.anyio


class Starts:
    """Starts data processes, while it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_possible = True
        monkeypatch.setattr(inside_agents, "spawner", self._spawner)

    def _spawner(self, loop: Any) -> Any:
        real = spawner(loop)

        def spawn(*arguments: Any) -> DataProcessHandle:
            if not self.is_possible:
                raise OSError(11, "out of processes")
            return real(*arguments)

        return spawn

    @contextmanager
    def stopped(self, agent: PrefillAgent) -> Iterator[None]:
        self.is_possible = False
        kill(agent)
        yield
        self.is_possible = True


def kill(agent: PrefillAgent) -> None:
    os.kill(agent.data_pid, signal.SIGKILL)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(monkeypatch)


def num_memfds(agent: PrefillAgent) -> int:
    return Path(f"/proc/{agent.data_pid}/maps").read_text().count("memfd:")


async def restarted(agent: PrefillAgent) -> None:
    boot = agent.runtime.agent.data.boot
    kill(agent)
    await until(lambda: agent.runtime.agent.data.boot not in ("", boot))


async def test_agent_inheriting_many_open_files_has_data_process(folder: Path) -> None:
    with ExitStack() as files:
        for _ in range(1100):
            files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        async with prefill_agent(folder) as agent:
            await agent.runtime.agent.data.call(wire.OpenNixl())


async def test_reads_from_ended_data_process_are_not_committed(case: Case) -> None:
    """Its pid, its port and its addresses may be those of another process since."""
    before = await case.shake()
    await restarted(case.agent)
    for ask in (case.commit, case.ask_check, case.renew):
        with pytest.raises(RequestRefused, match="data process") as refused:
            await ask(nixl_agent=before.nixl_agent)
        assert refused.value.code is ErrorCode.STALE
    now, packed = await case.shake(), await case.packed()
    assert now.nixl_agent != before.nixl_agent
    assert now.memory_id == before.memory_id
    assert now.memory.addresses[0].keys() == before.memory.addresses[0].keys()
    assert torch.equal(case.slot(packed), case.wanted())
    await case.ask_check(nixl_agent=now.nixl_agent)
    await case.renew(nixl_agent=now.nixl_agent)
    await case.commit(nixl_agent=now.nixl_agent)


async def test_tiles_and_handshakes_are_refused_without_data_process(
    starts: Starts, agent: PrefillAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus_prefill.handshakes.HANDSHAKE_WITHIN_S", 0.2)
    report = agent.runtime.report
    async with case_of(agent) as case:
        await case.shake()
        with starts.stopped(agent):
            await until(lambda: "out of processes" in agent.runtime.agent.data.problem)
            refused = await case.refusal()
            with pytest.raises(RequestRefused, match="out of processes") as busy:
                await case.shake()
            faults = [fault.what for fault in report.unready()]
        await until(lambda: not report.unready())
        packed = await case.packed()
        assert torch.equal(case.slot(packed), case.wanted())
    assert (refused.code, busy.value.code) == (ErrorCode.TRANSFER_FAILED, ErrorCode.BUSY)
    assert faults == ["the data process does not run: cannot be started: out of processes"]


async def test_a_slot_is_not_free_before_it_is_wiped(starts: Starts, folder: Path) -> None:
    async with prefill_agent(folder, exposure="staging") as wiping, case_of(wiping) as case:
        packed = await case.packed()
        with starts.stopped(wiping):
            await until(lambda: not wiping.runtime.agent.data.is_running)
            await case.give_back(packed)
            assert wiping.counts["slots"] == 1
        await until(lambda: not wiping.counts["slots"])


async def test_engine_ends_without_data_process(starts: Starts, agent: PrefillAgent) -> None:
    async with agent.reader() as reader:
        async with engine(agent.attach, memory=Memory(), seed=1) as source:
            _, case = await lease(agent, source, reader)
            local = case.local
            starts.is_possible = False
            kill(agent)
            await until(lambda: not agent.runtime.agent.data.is_running)
        await until(lambda: local.lost and not agent.runtime.agent.engines.engines)
        starts.is_possible = True
        await until(lambda: agent.runtime.agent.data.is_running)
        async with case_of(agent) as after:
            await after.packed()
            assert num_memfds(agent) == 1


async def test_engine_with_memory_not_mappable_again_is_sent_away(agent: PrefillAgent) -> None:
    """It was truncated, and nothing has touched it since."""
    spec = make_spec()
    rank = lay_out_rank(spec, 0, NHD, num_blocks=NUM_BLOCKS)
    (segment,) = rank.segments
    async with Connection(agent.attach, spec.engine_id) as connection:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:  # cannot be sealed
            file.truncate(segment.size_bytes)
            passed = PassSegment(segment.segment_id, segment.size_bytes)
            await connection.pass_memory(passed, file.fileno())
            await connection.request(Register(engine=spec, rank=rank))
            local = agent.runtime.agent.engines.engines[spec.engine_id]
            before = local.lost
            file.truncate(0)
            await restarted(agent)
            await until(lambda: local.lost)
    assert not before
