"""Fixtures of the decode agent's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.decode.neighbours import Neighbours, neighbours


@pytest.fixture
async def both(folder: Path) -> AsyncIterator[Neighbours]:
    async with neighbours(folder) as started:
        yield started
