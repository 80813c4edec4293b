"""Agents that give up soon: shared ones for faults that they survive, fresh ones for the others."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents import AgentProcess, Agents, agents_ended

PREFILL: dict[str, Any] = {"late_read_s": 1.0, "drain_timeout_s": 20.0}
DECODE: dict[str, Any] = {"lease_s": 3.0, "request_timeout_s": 5.0, "drain_timeout_s": 20.0}
SLOW_READS: dict[str, Any] = {
    "env": {"UCX_TLS": "tcp"},
    "transport": {"slice_bytes": 4096, "slice_descriptors": 1, "close_timeout_s": 1.0},
}


class Started(Agents):
    """Agents with the settings of this folder."""

    def prefill(self, **settings: Any) -> AgentProcess:
        """A prefill agent that is not started yet."""
        agent: AgentProcess = self.prepare("prefill", **{**PREFILL, **settings})
        return agent

    def decode(self, **settings: Any) -> AgentProcess:
        """A decode agent that is not started yet."""
        agent: AgentProcess = self.prepare("decode", **{**DECODE, **settings})
        return agent


@pytest.fixture(scope="package")
def shared() -> Iterator[Started]:
    """The agents of this folder, ended with its last test."""
    with agents_ended(Started) as agents:
        agents.start(agents.prefill(), agents.decode())
        yield agents


@pytest.fixture
def agents(shared: Started) -> Iterator[Started]:
    """The shared agents, which must hold nothing after each test."""
    yield shared
    shared.check()


@pytest.fixture
def prefill(agents: Started) -> AgentProcess:
    """The shared prefill agent."""
    return agents.all[0]


@pytest.fixture
def decode(agents: Started) -> AgentProcess:
    """The shared decode agent."""
    return agents.all[1]


@pytest.fixture
def fresh() -> Iterator[Started]:
    """Makes agents for one test; those that still live must hold nothing after it."""
    with agents_ended(Started) as agents:
        yield agents
        agents.check()


@pytest.fixture(scope="package")
def shared_slow() -> Iterator[Started]:
    """Two agents whose reads need both of them, and take long."""
    with agents_ended(Started) as agents:
        agents.start(agents.prefill(**SLOW_READS), agents.decode(**SLOW_READS))
        yield agents


@pytest.fixture
def slow(shared_slow: Started) -> Iterator[Started]:
    """The slow agents, for faults that they survive."""
    yield shared_slow
    shared_slow.check()
