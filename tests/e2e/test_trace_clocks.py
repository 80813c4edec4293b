"""Agents whose clocks differ are on one clock in a trace, within a millisecond of the truth."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents import Agents, agents_ended
from tests.e2e.test_trace import handed_off, names, told
from tests.namespaces import why_no_other_clock, with_other_clock

pytestmark = pytest.mark.anyio

AHEAD_S = {"prefill": 0.05, "decode": -0.05}
WITHIN_S = 1e-3
TRIES = 20
"""A busy machine answers late now and then: the trace says so, and is asked for again."""


@pytest.fixture
def skewed() -> Iterator[Agents]:
    """Two agents whose clocks are a tenth of a second apart."""
    if reason := why_no_other_clock():
        pytest.skip(reason)
    with agents_ended(Agents) as agents:
        for role, ahead_s in AHEAD_S.items():
            agents.prepare(role).runner = with_other_clock(ahead_s)
        agents.start(*agents.all)
        yield agents
        agents.check()


async def precise(peer: str) -> dict[str, Any]:
    """A trace whose clocks are known well enough."""
    for _ in range(TRIES):
        answer = await told("skewed", "--peer", peer)
        if max(one["clock_error_s"] for one in answer["agents"]) <= WITHIN_S:
            return answer
    pytest.fail(f"no agent answered within {2 * WITHIN_S} s: {answer['agents']}")


async def test_clocks_that_differ_are_placed_by_messages(skewed):
    prefill, decode = skewed.all
    await handed_off(prefill, decode, "skewed")

    answer = await precise(decode.peer)

    for one in answer["agents"]:
        wrong_by_s = one["clock_offset_s"] + AHEAD_S[one["role"]]
        assert abs(wrong_by_s) <= one["clock_error_s"] <= WITHIN_S
    of_fetch, of_offer = answer[decode.settings["agent_id"]], answer[prefill.settings["agent_id"]]
    claiming = of_fetch[names(of_fetch).index("claiming")]
    leased = of_offer[names(of_offer).index("leased")]
    apart_s = sum(one["clock_error_s"] for one in answer["agents"])
    assert claiming["start_s"] - apart_s <= leased["start_s"] <= claiming["end_s"] + apart_s
