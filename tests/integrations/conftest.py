"""Two agents for the tests of this folder."""

import signal
from collections.abc import Iterator

import pytest

from tests.agents import Agents, agents_ended, wait_until

PATIENT_S = 20.0
"""For the handshake of agents that have just started, on a busy machine."""


@pytest.fixture(scope="package")
def shared_agents() -> Iterator[Agents]:
    """The agents of this folder, ended with its last test."""
    with agents_ended(Agents) as agents:
        agents.prepare("prefill")
        agents.prepare("decode", request_timeout_s=PATIENT_S)
        agents.start(*agents.all)
        yield agents


@pytest.fixture
def agents(shared_agents: Agents) -> Iterator[Agents]:
    """A prefill and a decode agent that run, hold nothing, and whose log begins with the test."""
    for agent in shared_agents.all:
        if agent.alive:
            agent.skip_log()
        else:
            agent.start()
    yield shared_agents
    for agent in shared_agents.all:
        if agent.alive:
            agent.signal(signal.SIGCONT)  # of a test that failed before it did
            wait_until(agent.idle, f"the {agent.role} agent holds nothing")
