"""One prefill agent and two decode agents for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.agents import AgentProcess, Agents, agents_ended


@pytest.fixture
def anyio_backend() -> str:
    """The SDK needs the asyncio backend."""
    return "asyncio"


@pytest.fixture(scope="session")
def shared() -> Iterator[Agents]:
    """The agents of this folder, ended with the session."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode"), agents.prepare("decode"))
        yield agents


@pytest.fixture
def agents(shared: Agents) -> Iterator[Agents]:
    """The shared agents, which must hold nothing after each test."""
    yield shared
    shared.check()


@pytest.fixture
def prefill(agents: Agents) -> AgentProcess:
    """The prefill agent."""
    return agents.all[0]


@pytest.fixture
def decode(agents: Agents) -> AgentProcess:
    """The decode agent."""
    return agents.all[1]


@pytest.fixture
def other_decode(agents: Agents) -> AgentProcess:
    """Another decode agent."""
    return agents.all[2]
