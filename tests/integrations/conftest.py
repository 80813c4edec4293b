"""Two agents for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.agents import Agents, agents_ended

PATIENT_S = 20.0
"""For the handshake of agents that have just started, on a busy machine."""


@pytest.fixture
def agents() -> Iterator[Agents]:
    """A prefill and a decode agent of each test's own, as tests end and restart them."""
    with agents_ended(Agents) as agents:
        agents.prepare("prefill")
        agents.prepare("decode", request_timeout_s=PATIENT_S)
        agents.start(*agents.all)
        yield agents
