"""The agents of all tests of this folder: for engines that are alike, and for others."""

from collections.abc import Iterator

import pytest

from tests.agents import AgentProcess, Agents, agents_ended
from tests.e2e.shapes import PATHS, SLOT_BYTES, ShapedAgents


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    """The agents of this folder, ended with its last test."""
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


@pytest.fixture(scope="package")
def shaped() -> Iterator[Agents]:
    """Agents with few and small staging slots, so that a few tokens are many boxes."""
    with agents_ended(Agents) as agents:
        settings = {
            "slot_bytes": SLOT_BYTES,
            "staging_bytes": 4 * SLOT_BYTES,
            "max_refusal_lines_s": 1000,  # tests of what is refused read each line
        }
        agents.start(agents.prepare("prefill", **settings))
        for path in (*PATHS, "auto"):  # side by side they are too slow on few cores
            mapped = path == "mapped"
            reads = {"path": path, "mapped": mapped, "digest": "full"}
            agents.start(agents.prepare("decode", **reads, **settings))
        yield agents


@pytest.fixture
def shapes(shaped: Agents) -> Iterator[ShapedAgents]:
    """The agents for engines of different shapes, which must hold nothing after each test."""
    prefill, *readers = shaped.all
    yield ShapedAgents(prefill, dict(zip((*PATHS, "auto"), readers, strict=True)))
    shaped.check()


@pytest.fixture
def fresh_pair() -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """A prefill and a decode agent that have done nothing yet."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode"))
        yield agents.all[0], agents.all[1]
        agents.check()
