"""Two agents for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.agents import Agents, agents_ended


@pytest.fixture
def agents() -> Iterator[Agents]:
    """A prefill and a decode agent of each test's own, as tests end and restart them."""
    with agents_ended(Agents) as agents:
        agents.start(agents.prepare("prefill"), agents.prepare("decode"))
        yield agents
