"""Where a fetch failed, the trace says so, and not that nobody asked for the offer."""

import pytest

from kvbus.protocol import AgentRole, Span
from kvbus.trace import AgentTrace, Timeline
from kvbus.trace.failure import failure
from tests.trace.traces import REASON, agent, failed_fetch, fetch, offer, unread_offer

CANCELLED = "cancelled: the engine cancelled the fetch"


@pytest.mark.parametrize(
    ("agents", "expected"),
    [
        ([offer(), fetch()], ""),
        (
            [unread_offer(), failed_fetch()],
            f"the fetch failed after 1.700 ms (claiming): {REASON}",
        ),
        (
            [unread_offer(), failed_fetch(reason=CANCELLED)],
            f"the fetch was cancelled after 1.700 ms (claiming): {CANCELLED}",
        ),
        (
            [failed_fetch(at_s=9.0), failed_fetch(at_s=3.0, reason="busy: later"), fetch()],
            f"2 of 3 fetches failed, the last after 1.700 ms (claiming): {REASON}",
        ),
        (
            [agent(AgentRole.DECODE, Span("fetch", 0.0, 0.5, 0, "", "timeout: no answer"))],
            "the fetch failed after 500.000 ms: timeout: no answer",
        ),
    ],
    ids=["none", "one", "cancelled", "several", "without stages"],
)
def test_a_fetch_that_failed_is_said_with_when_where_and_why(
    agents: list[AgentTrace], expected: str
) -> None:
    assert failure(Timeline.of(agents, now_s=30.0)) == expected


def test_an_offer_whose_fetch_failed_is_not_said_to_be_asked_for_by_nobody() -> None:
    timeline = Timeline.of([unread_offer(), failed_fetch()], now_s=30.0)

    assert timeline.verdict() == "100% of 22837.028 ms: ready, but nobody fetched it"
