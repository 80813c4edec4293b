"""The timeline puts all agents on one clock, and says where the time went."""

import pytest

from kvbus.protocol import AgentRole, Span
from kvbus.trace import UNKNOWN, Timeline, covered_s
from tests.trace.traces import agent, fetch, offer


@pytest.mark.parametrize("offset_s", [0.0, 0.05, -12_345.5])
def test_shares_add_up_to_the_whole_whatever_the_clocks_say(offset_s: float) -> None:
    timeline = Timeline.of([fetch(offset_s=offset_s), offer()], now_s=20.0)

    assert timeline.total_s == pytest.approx(10.0)
    assert timeline.shares() == pytest.approx(
        {
            "reading": 4.5,
            "waiting for prefill to compute": 2.5,
            "computing the prompt, before a decode engine asked for it": 1.0,
            "waiting for the lease of the offer": 1.0,
            "asking whether the bytes are good": 1.0,
        }
    )
    assert next(iter(timeline.shares())) == "reading"


def test_the_verdict_names_the_largest_share_and_what_was_most_of_the_reading() -> None:
    timeline = Timeline.of([offer(), fetch()], now_s=20.0)

    assert timeline.verdict() == "45% of 10000.000 ms: reading, most of it READ (3000.000 ms)"


def test_agents_come_in_order_of_their_first_span_and_without_any_not_at_all() -> None:
    timeline = Timeline.of([fetch(), agent(AgentRole.DECODE), offer()], now_s=20.0)

    assert [one.answer.role for one in timeline.agents] == ["prefill", "decode"]


def test_the_ways_between_engine_and_agent_are_said_to_be_ways() -> None:
    fetched = (
        Span("fetch", 0.0, 10.0),
        Span("asked", 0.0, 5.0, 1),
        Span("reading", 5.0, 6.0, 1),
        Span("telling", 6.0, 10.0, 1),
    )
    offered = (
        Span("offer", 11.0, 14.0),
        Span("asked", 11.0, 12.0, 1),
        Span("telling", 12.0, 14.0, 1),
    )
    timeline = Timeline.of(
        [agent(AgentRole.DECODE, *fetched), agent(AgentRole.PREFILL, *offered)], now_s=20.0
    )

    assert timeline.verdict().endswith(": on the way from the decode engine to its agent")
    assert timeline.shares() == {
        "on the way from the decode engine to its agent": 5.0,
        "on the way from the decode agent to its engine": 4.0,
        "on the way from the prefill agent to its engine": 2.0,
        "reading": 1.0,
        "on the way from the prefill engine to its agent": 1.0,
        UNKNOWN: 1.0,
    }


def test_what_waits_in_the_decode_engine_counts_until_that_asks() -> None:
    spans = (
        Span("fetch", 5.0, 6.0),
        Span("reading", 5.0, 6.0, 1),
        Span("pending", 0.0, 5.0),
    )
    offered = Span("offer", 0.0, 5.0), Span("sealed", 0.0, 5.0, 1)
    timeline = Timeline.of(
        [agent(AgentRole.DECODE, *spans), agent(AgentRole.PREFILL, *offered)], now_s=20.0
    )

    assert timeline.shares() == {
        "waiting in the decode engine for its turn": 5.0,
        "reading": 1.0,
    }


def test_what_goes_on_goes_on_until_now() -> None:
    timeline = Timeline.of(
        [agent(AgentRole.PREFILL, Span("offer", 1.0), Span("open", 1.0, None, 1))], now_s=3.5
    )

    assert timeline.total_s == 2.5
    assert timeline.verdict().startswith("100% of 2500.000 ms: computing the prompt")


def test_a_time_of_which_no_agent_knows_is_said_to_be_one() -> None:
    early, late = Span("offer", 0.0, 1.0), Span("sealed", 0.0, 1.0, 1)
    timeline = Timeline.of([agent(AgentRole.PREFILL, early, late), fetch(offset_s=-2)], now_s=20.0)
    gap = agent(AgentRole.DECODE, Span("fetch", 4.0, 5.0), Span("reading", 4.0, 5.0, 1))

    assert UNKNOWN not in timeline.shares()
    shares = Timeline.of([agent(AgentRole.PREFILL, early, late), gap], now_s=20.0).shares()
    assert shares[UNKNOWN] == pytest.approx(3.0)


def test_spans_at_the_same_time_count_once() -> None:
    assert covered_s([Span("a", 0.0, 2.0), Span("b", 1.0, 3.0), Span("c", 5.0, 6.0)]) == 4.0
