"""Who is turned away when it connects, and what it is told."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest

from kvbus.errors import ErrorCode, RequestRefused
from kvbus.memory.attach import AttachClient

pytestmark = pytest.mark.anyio
Serving = Callable[..., Any]


async def test_one_connection_too_many_is_told_that_the_agent_is_busy(
    serving: Serving, num_open_fds: Callable[[], int]
) -> None:
    before = num_open_fds()
    async with serving(max_connections=1) as recorded:
        async with AttachClient(recorded.server.path) as first:
            await first.call({})
            for _ in range(3):
                async with AttachClient(recorded.server.path) as second:
                    with pytest.raises(RequestRefused) as caught:
                        await second.call({"text": "x" * 60_000})
            assert await first.call({}) == {"seen": 0}
        await recorded.one_closed.wait()
        async with AttachClient(recorded.server.path) as third:
            assert await third.call({}) == {"seen": 0}

    assert caught.value.code == ErrorCode.BUSY
    assert recorded.server.counts.num_refused_busy == 3
    assert len(recorded.closed) == 2
    assert num_open_fds() == before


async def test_our_own_user_is_refused_when_it_is_not_allowed(serving: Serving) -> None:
    async with (
        serving(allowed_uids={os.getuid() + 1}) as recorded,
        AttachClient(recorded.server.path) as client,
    ):
        with pytest.raises(RequestRefused, match="may not attach"):
            await client.call({})
        await client.closed.wait()

    assert recorded.server.counts.num_refused_users == 1
    assert recorded.closed == []


def let_everybody_in(path: Path) -> None:
    path.parent.chmod(0o755)
    path.chmod(0o666)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_although_the_file_modes_would_let_it_in(
    serving: Serving, child_command: Callable[..., list[str]]
) -> None:
    async with serving() as recorded:
        let_everybody_in(recorded.server.path)
        result = await anyio.run_process(child_command("stranger", recorded.server.path))

    words = msgpack.unpackb(result.stdout[4:])
    assert words["error"]["detail"] == {"uid": 65534}
    assert recorded.server.counts.num_refused_users == 1
    assert recorded.messages == []
    assert recorded.closed == []


async def test_a_client_that_was_turned_away_before_it_asked_still_learns_why(
    serving: Serving,
) -> None:
    async with (
        serving(allowed_uids={os.getuid() + 1}) as recorded,
        AttachClient(recorded.server.path) as client,
    ):
        await client.closed.wait()
        for _ in range(2):
            with pytest.raises(RequestRefused, match="may not attach"):
                await client.call({})
