"""Fixtures of the prefill agent's tests."""

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.memory import copying
from tests.prefill.inside import WITHIN_S, PrefillAgent, prefill_agent
from tests.prefill.leases import Case, leased


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
    """Copies into slots that stand in their thread until they may go on."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    async def wait_begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.begun.wait, WITHIN_S)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    """From now on every copy stands still before it begins."""
    held, gather = HeldUp(), copying.gather

    def late_gather(*arguments: Any) -> None:
        held.begun.set()
        assert held.may_end.wait(WITHIN_S)
        gather(*arguments)

    monkeypatch.setattr(copying, "gather", late_gather)
    yield held
    held.may_end.set()
