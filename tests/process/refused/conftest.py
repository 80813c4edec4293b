"""Two agents that refuse what is tried here, and go on."""

from collections.abc import Awaitable, Iterator

import pytest

from kvbus.errors import ErrorCode, RequestRefused
from tests.support.agents import Agents, started


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    """A prefill and a decode agent."""
    # Many are refused within a second, and a line about each is waited for: at debug, none is left
    # out.
    with started("prefill", "decode", log_level="debug") as agents:
        yield agents


async def code_of(registering: Awaitable[object]) -> ErrorCode:
    """Of a request that must be refused."""
    with pytest.raises(RequestRefused) as refused:
        await registering
    return refused.value.code
