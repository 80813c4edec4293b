"""Agents that somebody attacks."""

from collections.abc import Iterator

import pytest

from kvbus.keys import Role
from tests.agents import AgentProcess, Agents, agents_ended
from tests.bus.conftest import context, endpoint, raw_peer, record, running
from tests.keyring import KeyRing

__all__ = ["context", "endpoint", "raw_peer", "record", "running"]


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    """The keys of the agents of `pair`, and of others."""
    return KeyRing(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="package")
def pair(ring: KeyRing) -> Iterator[Agents]:
    """A prefill and a decode agent with keys; there is a key of each role beside theirs."""
    with agents_ended(Agents) as agents:
        for role in (Role.PREFILL, Role.DECODE):
            ring.prepare(agents, role, role.value)
        for role in Role:
            ring.trust(f"any-{role}", role)
        agents.start(*agents.all)
        yield agents


@pytest.fixture
def keyed_prefill(pair: Agents) -> Iterator[AgentProcess]:
    """The prefill agent with keys; both must hold nothing after a test."""
    yield pair.all[0]
    pair.check()


@pytest.fixture
def keyed_decode(pair: Agents) -> AgentProcess:
    """The decode agent with keys."""
    return pair.all[1]
