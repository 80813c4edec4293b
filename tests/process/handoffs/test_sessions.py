"""What an engine can do with its agent by the SDK, and what others see of it."""

import uuid
from typing import Any

import pytest

from kvbus.engine import (
    AgentRole,
    Link,
)
from kvbus.errors import LocalError
from tests.process.handoffs.shapes import GROUP, WINDOW, ShapedAgents, Side, two_engines
from tests.support.agents import AgentProcess
from tests.support.engines import (
    hand_over,
    make_spec,
    pair,
    works,
)

pytestmark = pytest.mark.anyio

BLOCK: dict[str, Any] = {"num_tokens": 16, "block_ids": {"full": [1]}}


async def test_link_for_wrong_agent_kind_is_refused_with_both_named(
    decode: AgentProcess,
) -> None:
    with pytest.raises(LocalError, match="for decode engines, not prefill"):
        async with Link(decode.attach, make_spec(), role=AgentRole.PREFILL):
            pass


@pytest.mark.parametrize(("size", "are_whole"), [(8, True), (48, False)])
async def test_fetch_tells_whether_window_blocks_are_whole(
    shapes: ShapedAgents, size: int, are_whole: bool
) -> None:
    """Of a prefill engine that has the window's blocks of 8 tokens, and nothing before them."""
    sides, groups = (Side(block_size=8), Side(block_size=size)), (GROUP, WINDOW)
    async with two_engines(shapes, "direct", *sides, groups=groups) as engines:
        fetched = await hand_over(*engines, 60, only_tails=True)

        assert fetched.whole_blocks is are_whole


async def test_status_shows_held_and_work_is_counted_and_logged_once(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    counts: list[tuple[AgentProcess, str, dict[str, str], float]] = [
        (decode, "handoffs_total", {"outcome": "completed"}, 1),
        (decode, "read_bytes_total", {}, 16 * 2 * 2 * 6 * 8 * 2),
        (decode, "handoff_seconds_count", {}, 1),
        (prefill, "offers_total", {"outcome": "completed"}, 1),
        (prefill, "leases_total", {"reason": "ended"}, 1),
        (decode, "digests_total", {"outcome": "equal"}, 0),
    ]

    def read() -> list[float]:
        return [agent.metric(name, **labels) for agent, name, labels, _ in counts]

    request_id = uuid.uuid4().hex
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        before = read()
        offer = await source.prefill.offer(request_id, **BLOCK)
        theirs, ours = prefill.status(), decode.status()
        await target.decode.fetch(offer.ticket, **BLOCK, chunk_tokens=16).ended  # under a lease
        await offer.ended
        told = [
            agent.says(event, request_id=request_id)
            for agent, event in ((prefill, "offer.released"), (decode, "handoff.completed"))
        ]
        gained = [now - then for now, then in zip(read(), before, strict=True)]

        assert (theirs["role"], theirs["draining"]) == ("prefill", False)
        assert theirs["agent_id"] == prefill.settings["agent_id"]
        assert theirs["engines"] == {source.spec.engine_id: True}
        assert theirs["counts"].items() >= {"offers": 1, "leases": 0}.items()
        assert ours["engines"] == {target.spec.engine_id: True}
        assert ours["counts"].items() >= {"fetches": 0, "draining_fetches": 0}.items()
        assert gained == [expected for *_, expected in counts]
        assert [len(lines) for lines in told] == [1, 1]
        assert decode.metric("engines") == prefill.metric("engines") == 1
        assert decode.metric("peers") >= 1
        assert decode.metric("data_jobs") == 0
