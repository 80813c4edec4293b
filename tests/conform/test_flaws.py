"""Each rule of conform is broken by an engine with one flaw, and conform says so."""

from pathlib import Path

import pytest

from kvbus.conform.book import Verdict
from kvbus.conform.play import play
from kvbus.conform.rules import RULES
from kvbus.conform.stage import START_S
from kvbus.protocol import AgentRole
from tests.conform.engines import named, raw_engine

PATIENCE_S = 1.5
"""Short, as most flaws are seen by what does not happen."""
WAITED_FOR_S = {
    **dict.fromkeys(("missing_rank", "other_boot", "double_key", "no_version", "overlap"), 4.0),
    "stays_lost": 10.0,
}
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
    "changed_repeats": ("lost_reply", "requests.same_frame"),
    "no_repeats": ("lost_reply", "requests.repeats"),
    "early_repeats": ("lost_reply", "requests.repeats"),
    "new_ids": ("lost_reply", "requests.late_reply"),
    "replies_in_order": ("other_order", "requests.order"),
    "strict_fields": ("other_order", "requests.unknown_field"),
    "dies_of_codes": ("unknown_code", "requests.unknown_code"),
    "busy_not_again": ("busy", "requests.busy"),
    "busy_at_once": ("busy", "requests.busy"),
    "no_ping": ("silence", "requests.ping"),
    "end_not_told": ("twice", "notices.once"),
    "reply_first": ("ended_first", "notices.before_reply"),
    "notices_as_they_come": ("early", "notices.order"),
    "no_ack": ("twice", "notices.ack"),
    "repeat_not_acked": ("twice", "notices.ack"),
    "unknown_not_acked": ("many", "notices.ack"),
    "ack_early": ("early", "notices.honest_ack"),
    "missing_rank": ("stop", "register.sessions"),
    "two_engines": ("stop", "register.same_engine"),
    "overlap": ("stop", "register.memory"),
    "stays_lost": ("hang_up", "ends.hang_up"),
    "lost_not_told": ("hang_up", "ends.told"),
    "never_ends": ("stop", "ends.stop"),
    "bad_status": ("stop", "ends.stop"),
}
OF_PREFILL = {
    "notices_repeated": ("twice", "notices.once"),
    "reply_first": ("ended_first", "notices.before_reply"),
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
    *((AgentRole.DECODE, flaw, *case) for flaw, case in {**FLAWS, **OF_DECODE}.items()),
    *((AgentRole.PREFILL, flaw, *case) for flaw, case in OF_PREFILL.items()),
]

TOO_EARLY = [
    case
    for case in CASES
    if case[1]
    in ("reuse_withdrawn", "reuses_offered", "reuses_early", "reuses_cancelled", "same_memory")
]
"""Blocks are used that are not free: it must not count which ones an allocator takes first."""


@pytest.mark.parametrize(
    ("role", "flaw", "scene", "rule"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_a_flaw_is_named_by_its_rule(
    role: AgentRole, flaw: str, scene: str, rule: str, tmp_path: Path
) -> None:
    outcomes = play(
        role,
        raw_engine(role, flaw),
        log=tmp_path / "log",
        patience_s=PATIENCE_S,
        start_s=WAITED_FOR_S.get(flaw, START_S),
        only=[scene],
    )

    assert rule in named(outcomes, Verdict.FAILED)


def test_every_rule_has_a_flaw_that_breaks_it() -> None:
    assert {rule for *_, rule in CASES} == RULES.keys()


@pytest.mark.parametrize("allocator", ["queue", "random"])
@pytest.mark.parametrize("case", TOO_EARLY, ids=[f"{case[0]}-{case[1]}" for case in TOO_EARLY])
def test_blocks_that_are_used_too_early_are_seen_whatever_the_allocator(
    case: tuple[AgentRole, str, str, str], allocator: str, tmp_path: Path
) -> None:
    role, flaw, scene, rule = case
    command = raw_engine(role, flaw, allocator)

    outcomes = play(role, command, log=tmp_path / "log", patience_s=PATIENCE_S, only=[scene])

    assert rule in named(outcomes, Verdict.FAILED)


@pytest.mark.parametrize("allocator", ["queue", "random"])
@pytest.mark.parametrize("role", AgentRole)
def test_blocks_that_are_used_in_time_break_no_rule_whatever_the_allocator(
    role: AgentRole, allocator: str, tmp_path: Path
) -> None:
    outcomes = play(role, raw_engine(role, "", allocator), log=tmp_path / "log", only=["blocks"])

    assert named(outcomes, Verdict.FAILED) == {}


@pytest.mark.parametrize("role", AgentRole)
def test_an_engine_without_a_flaw_breaks_no_rule(role: AgentRole, tmp_path: Path) -> None:
    outcomes = play(role, raw_engine(role), log=tmp_path / "log")

    assert named(outcomes, Verdict.FAILED) == {}
    assert named(outcomes, Verdict.UNTRIED) == {}
