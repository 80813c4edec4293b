"""A defect in what only makes fetches quicker must not end an agent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.warm import WarmPeers
from tests.agents import until

pytestmark = pytest.mark.anyio

LISTED = "tcp://127.0.0.1:1"


class Broken:
    """A directory that has no agents."""

    def acquire(self, _: object) -> None:
        raise ZeroDivisionError


async def test_a_defect_keeps_the_agent_that_it_is_about_cold_and_nothing_else() -> None:
    bind = "tcp://127.0.0.1:0"
    config = DecodeConfig(agent_id="decode-0", peers=(LISTED,), peer_bind=bind, events_bind=bind)
    async with anyio.create_task_group() as tasks:
        agent: Any = SimpleNamespace(tasks=tasks, loop=asyncio.get_running_loop())
        directory: Any = Broken()
        nothing: Any = None
        peers = WarmPeers(agent, config, directory, nothing, nothing)
        peers.start()
        await until(lambda: peers.view(LISTED).problem)
        tasks.cancel_scope.cancel()

    assert "ZeroDivisionError" in peers.view(LISTED).problem
    assert peers.num_warm == 0
