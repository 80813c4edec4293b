"""Fixtures of the prefill agent's tests."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.agents import until
from tests.unit.prefill.inside import PrefillAgent, prefill_agent
from tests.unit.prefill.leases import Case, leased


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[PrefillAgent]:
    """A prefill agent with four slots of 64 KiB."""
    async with prefill_agent(folder) as started:
        yield started


@pytest.fixture
async def case(agent: PrefillAgent) -> AsyncIterator[Case]:
    """An engine of that agent, and a leased offer."""
    async with (
        agent.engine() as source,
        agent.reader() as reader,
        leased(agent, source, reader) as made,
    ):
        yield made


class HeldUp:
    """The data process of an agent, which is stopped: its jobs end only after `go_on`."""

    def __init__(self, agent: PrefillAgent) -> None:
        self._data, self._pid = agent.runtime.agent.data, agent.data_pid
        os.kill(self._pid, signal.SIGSTOP)

    async def wait_begun(self) -> None:
        """Return when there is a job."""
        await until(lambda: self._data.num_jobs)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@contextmanager
def held_up(agent: PrefillAgent) -> Iterator[HeldUp]:
    """Within, no copy and no digest begins before `HeldUp.go_on`."""
    held = HeldUp(agent)
    try:
        yield held
    finally:
        held.go_on()
