"""Two agents that refuse what is tried here, and go on."""

from collections.abc import Iterator

import pytest

from tests.agents import Agents, started


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    """A prefill and a decode agent."""
    # Many are refused within a second, and a line about each is waited for: at debug, none is left
    # out.
    with started("prefill", "decode", log_level="debug") as agents:
        yield agents
