"""Engines that keep to the page break no rule: on bare sockets, and on kvbus's own SDK."""

import sys

import pytest

from tests.conform.plays import ROLES, Play, Plays, raw_engine

SDK = (sys.executable, "-m", "tests.conform.sdk_engine")
WHOLE = [Play(role, command) for command in (raw_engine(), SDK) for role in ROLES]
IN_TIME = [
    Play(role, raw_engine("", allocator), ("--scene", "blocks"))
    for allocator in ("queue", "random")
    for role in ROLES
]
ALL = [*WHOLE, *IN_TIME]


@pytest.mark.parametrize(
    "number", range(len(WHOLE)), ids=["raw-prefill", "raw-decode", "sdk-prefill", "sdk-decode"]
)
def test_an_engine_without_a_flaw_breaks_no_rule(plays: Plays, number: int) -> None:
    ended = plays.ended(ALL, number)

    assert ended.seen("failed") == {}
    # A prefill engine with blocking calls has one request at a time.
    assert set(ended.seen("untried")) <= ({"requests.order"} if number >= 2 else set())
    assert ended.status == 0


@pytest.mark.parametrize("number", range(len(WHOLE), len(ALL)))
def test_blocks_that_are_used_in_time_break_no_rule_whatever_the_allocator(
    plays: Plays, number: int
) -> None:
    ended = plays.ended(ALL, number)

    assert ended.seen("failed") == {}
    assert "offer.reused" in ended.seen("passed") or "fetch.reused" in ended.seen("passed")
