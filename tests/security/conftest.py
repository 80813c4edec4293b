"""Agents that somebody attacks."""

from collections.abc import Iterator

import pytest

from tests.agents import Agents, agents_ended
from tests.bus.conftest import context, endpoint, raw_peer, running

__all__ = ["context", "endpoint", "raw_peer", "running"]


@pytest.fixture
def fresh() -> Iterator[Agents]:
    """Agents of one test."""
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


@pytest.fixture
def anyio_backend() -> str:
    """The SDK needs the asyncio backend."""
    return "asyncio"
