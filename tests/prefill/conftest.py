"""Fixtures of the prefill agent's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.prefill.inside import PrefillAgent, prefill_agent
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
