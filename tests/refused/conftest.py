"""Two agents that refuse what is tried here, and go on."""

from collections.abc import Iterator

import pytest

from tests.agents import AgentProcess, Agents, agents_ended


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    """A prefill and a decode agent."""
    with agents_ended(Agents) as agents:
        # Many are refused within a second, and a line about each is waited for.
        sides = (agents.prepare(role, max_refusal_lines_s=10_000) for role in ("prefill", "decode"))
        agents.start(*sides)
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
