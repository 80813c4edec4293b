"""Fixtures of the prefill agent's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.prefill.inside import PrefillAgent, prefill_agent
from tests.unit.prefill.leases import Case, case_of


@pytest.fixture
async def agent(folder: Path) -> AsyncIterator[PrefillAgent]:
    """A prefill agent with four slots of 64 KiB."""
    async with prefill_agent(folder) as started:
        yield started


@pytest.fixture
async def case(agent: PrefillAgent) -> AsyncIterator[Case]:
    async with case_of(agent) as made:
        yield made
