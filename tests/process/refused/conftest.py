"""Two agents that refuse requests and continue."""

from collections.abc import Awaitable, Iterator

import pytest

from kvbus.errors import ErrorCode, RequestRefused
from tests.support.agents import Agents, started


@pytest.fixture(scope="package")
def shared() -> Iterator[Agents]:
    # Many are refused within a second, and a line about each is waited for: at debug, none is left
    # out.
    with started("prefill", "decode", log_level="debug") as agents:
        yield agents


async def code_of(registering: Awaitable[object]) -> ErrorCode:
    with pytest.raises(RequestRefused) as refused:
        await registering
    return refused.value.code
