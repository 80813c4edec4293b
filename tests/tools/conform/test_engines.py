"""Engines that keep to the page break no rule, and each rule is broken by an engine with one flaw.

They are on bare sockets, and on kvbus's own SDK.
"""

import sys

import pytest

from tests.tools.conform.conftest import ROLES, Play, Plays, raw_engine

SDK = (sys.executable, "-m", "tests.tools.conform.sdk_engine")
WHOLE = [Play(role, command) for command in (raw_engine(), SDK) for role in ROLES]
IN_TIME = [
    Play(role, raw_engine("", allocator), ("--scene", "blocks"))
    for allocator in ("queue", "random")
    for role in ROLES
]
ALL = [*WHOLE, *IN_TIME]
PATIENCE_S = 2.5
"""Short, as most flaws are seen by what does not happen."""
WAITED_FOR_S = dict.fromkeys(
    ("missing_rank", "other_boot", "double_key", "no_version", "overlap", "stays_lost"), 12
)
"""For flaws that keep an engine from registering: how long it is waited for."""

FLAWS = {
    "list": ("stop", "attach.framing"),
    "late_descriptor": ("stop", "attach.first_byte"),
    "two_descriptors": ("stop", "attach.first_byte"),
    "no_hello": ("stop", "attach.hello"),
    "number_as_text": ("stop", "attach.messages"),
    "same_boot": ("hang_up", "attach.boot"),
    "wrong_size": ("stop", "attach.size"),
    "unsealed": ("stop", "attach.seals"),
    "inherited": ("stop", "attach.inheritance"),
    "delimiter": ("stop", "frames.one"),
    "double_key": ("stop", "frames.maps"),
    "no_version": ("stop", "frames.envelope"),
    "other_boot": ("stop", "frames.boot"),
    "new_secrets": ("other_order", "frames.secret"),
    "told_secret": ("stop", "frames.secret"),
    "text_ids": ("other_order", "frames.body"),
    "ids_from_one": ("stop", "requests.ids"),
    "falling_ids": ("other_order", "requests.ids"),
    "repeats": ("late", "requests.once"),
    "asks_again": ("late", "requests.once"),
    "gives_up": ("late", "requests.late_answer"),
    "replies_in_order": ("other_order", "requests.order"),
    "strict_fields": ("other_order", "requests.unknown_field"),
    "dies_of_codes": ("unknown_code", "requests.unknown_code"),
    "busy_not_again": ("busy", "requests.busy"),
    "busy_at_once": ("busy", "requests.busy"),
    "no_ping": ("silence", "requests.ping"),
    "dies_of_notices": ("many", "notices.unknown"),
    "missing_rank": ("stop", "register.sessions"),
    "two_engines": ("stop", "register.same_engine"),
    "overlap": ("stop", "register.memory"),
    "stays_lost": ("hang_up", "ends.hang_up"),
    "lost_not_told": ("hang_up", "ends.told"),
    "never_ends": ("stop", "ends.stop"),
    "bad_status": ("stop", "ends.stop"),
}
OF_PREFILL = {
    "told_twice": ("many", "offer.told"),
    "end_not_told": ("many", "offer.told"),
    "gives_up": ("silence", "ends.silence"),
    "stays_lost": ("new_agent", "ends.new_agent"),
    "short_table": ("sizes", "offer.tables"),
    "first_block": ("sizes", "offer.tables"),
    "wrong_strides": ("sizes", "offer.numbers"),
    "wrong_heads": ("sizes", "offer.numbers"),
    "heads_swapped": ("sizes", "offer.numbers"),
    "late_numbers": ("sizes", "offer.numbers"),
    "extends_with_all": ("grows", "offer.extend"),
    "never_sealed": ("grows", "offer.sealed"),
    "reuse_withdrawn": ("blocks", "offer.unchanged"),
    "reuses_offered": ("blocks", "offer.unchanged"),
    "blocks_lost": ("blocks", "offer.reused"),
    "cell": ("sizes", "offer.cell"),
    "word_when_released": ("sizes", "offer.cell"),
    "word_when_lost": ("cells", "offer.cell"),
    "ticket_fields": ("sizes", "offer.ticket"),
    "ticket_letters": ("sizes", "offer.ticket"),
    "offers_nothing": ("sizes", "offer.answered"),
}
OF_DECODE = {
    "short_table": ("shapes", "fetch.tables"),
    "no_window": ("shapes", "fetch.tables"),
    "no_empty_tables": ("shapes", "fetch.tables"),
    "from_zero": ("shapes", "fetch.tokens"),
    "ticket_letters": ("shapes", "fetch.ticket"),
    "one_fetch_id": ("shapes", "fetch.id"),
    "ticket_fields": ("shapes", "fetch.ticket"),
    "wrong_strides": ("shapes", "fetch.numbers"),
    "wrong_heads": ("shapes", "fetch.numbers"),
    "does_not_look": ("counts", "fetch.numbers"),
    "uses_early": ("counts", "fetch.completed"),
    "landed_is_used": ("counts", "fetch.completed"),
    "told_twice": ("many", "fetch.told"),
    "end_not_told": ("many", "fetch.told"),
    "failed_is_used": ("failed", "fetch.failed"),
    "no_cancel": ("blocks", "fetch.cancel"),
    "reuses_early": ("blocks", "fetch.blocks"),
    "reuses_cancelled": ("blocks", "fetch.blocks"),
    "same_memory": ("hang_up", "fetch.lost_blocks"),
    "writes_early": ("counts", "fetch.blocks"),
    "blocks_lost": ("blocks", "fetch.reused"),
    "fetches_nothing": ("shapes", "fetch.answered"),
}
CASES = [
    *(("decode", flaw, *case) for flaw, case in {**FLAWS, **OF_DECODE}.items()),
    *(("prefill", flaw, *case) for flaw, case in OF_PREFILL.items()),
]
BROKEN_BY_THE_SDK = "offer.again"
"""The raw engine publishes no offer again, so the SDK's engine breaks this rule."""
TOO_EARLY = {
    *("reuse_withdrawn", "reuses_offered", "reuses_early", "reuses_cancelled", "same_memory"),
}
"""Blocks are used that are not free: it must not count which ones an allocator takes first."""


def a_play(role: str, flaw: str, scene: str, allocator: str) -> Play:
    options = ("--patience", str(PATIENCE_S), "--start", str(WAITED_FOR_S.get(flaw, 60)))
    return Play(role, raw_engine(flaw, allocator), (*options, "--scene", scene))


PLAYED = {
    "-".join((role, flaw, *others)): (a_play(role, flaw, scene, *(others or ["stack"])), rule)
    for role, flaw, scene, rule in CASES
    for others in ([], *([["queue"], ["random"]] if flaw in TOO_EARLY else []))
}
PLAYS = [play for play, _ in PLAYED.values()]


@pytest.mark.parametrize(
    "number", range(len(WHOLE)), ids=["raw-prefill", "raw-decode", "sdk-prefill", "sdk-decode"]
)
def test_an_engine_without_a_flaw_breaks_no_rule(plays: Plays, number: int) -> None:
    ended = plays.ended(ALL, number)

    assert ended.seen("failed") == {}
    # A prefill engine with blocking calls has one request at a time. That on bare sockets ends its
    # offers with their agent.
    untried = [{"offer.again"}, set[str](), {"requests.order"}, {"requests.order"}]
    assert set(ended.seen("untried")) <= untried[number]
    assert ended.status == 0


def test_republishing_offers_with_other_secret_breaks_the_rule(
    plays: Plays,
) -> None:
    play = Play("prefill", (*SDK, "other_secret"), ("--scene", "new_agent"))

    assert list(plays.ended([play], 0).seen("failed")) == [BROKEN_BY_THE_SDK]


@pytest.mark.parametrize("number", range(len(WHOLE), len(ALL)))
def test_blocks_used_in_time_break_no_rule_with_any_allocator(plays: Plays, number: int) -> None:
    ended = plays.ended(ALL, number)

    assert ended.seen("failed") == {}
    assert "offer.reused" in ended.seen("passed") or "fetch.reused" in ended.seen("passed")


@pytest.mark.parametrize(
    ("number", "rule"),
    [(number, rule) for number, (_, rule) in enumerate(PLAYED.values())],
    ids=PLAYED,
)
def test_a_flaw_is_named_by_its_rule(plays: Plays, number: int, rule: str) -> None:
    ended = plays.ended(PLAYS, number)

    assert rule in ended.seen("failed")
    assert ended.status == 1


def test_every_rule_has_a_flaw_that_breaks_it(plays: Plays) -> None:
    of_each_role = [Play(role, raw_engine(), ("--scene", "stop")) for role in ROLES]

    rules = [plays.ended(of_each_role, number).rules for number in range(len(ROLES))]

    assert {BROKEN_BY_THE_SDK, *(rule for *_, rule in CASES)} == rules[0].keys() | rules[1].keys()
