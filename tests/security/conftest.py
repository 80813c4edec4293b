"""Agents that somebody attacks."""

from collections.abc import Iterator

import pytest

from tests.agents import AgentProcess, Agents, agents_ended
from tests.bus.conftest import context, endpoint, raw_peer, record, running

__all__ = ["context", "endpoint", "raw_peer", "record", "running"]


@pytest.fixture
def fresh() -> Iterator[Agents]:
    """Agents of one test."""
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


@pytest.fixture(scope="session")
def shared() -> Iterator[Agents]:
    """The agents that survive what is tried here; they log all that they can."""
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill", log_level="debug"),
            agents.prepare("decode", log_level="debug"),
        )
        yield agents


@pytest.fixture
def agents(shared: Agents) -> Iterator[Agents]:
    """The shared agents, which must hold nothing after each test."""
    yield shared
    shared.check()


@pytest.fixture
def prefill(agents: Agents) -> AgentProcess:
    """The shared prefill agent."""
    return agents.all[0]


@pytest.fixture
def decode(agents: Agents) -> AgentProcess:
    """The shared decode agent."""
    return agents.all[1]


@pytest.fixture
def anyio_backend() -> str:
    """The SDK needs the asyncio backend."""
    return "asyncio"
