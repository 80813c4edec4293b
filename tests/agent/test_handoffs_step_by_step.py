"""Single handoffs through both tables, told step by step, in the world of the interleavings."""

import pytest

from kvbus.protocol.engine import Outcome
from tests.agent.handoff_world import NUM_TOKENS
from tests.agent.test_handoff_interleavings import HandoffInterleavings, connected


@pytest.mark.parametrize("has_state", [True, False])
def test_a_handoff_in_chunks_completes_with_the_right_kv_when_nothing_is_lost(
    has_state: bool,
) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=0, sealed=False, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0, has_state=has_state)
    connected(world)

    for _ in range(4):
        world.compute(0, num_more=8, seal=True, hint=True)
        connected(world)
        world.end_read(0, works=True)
    world.settle_everything()

    assert world.targets["fetch-0"].num_chunks == 4
    assert world.targets["fetch-0"].outcome is Outcome.COMPLETED
    assert world.sources["offer-0"].outcome is Outcome.COMPLETED


def test_a_fetch_whose_offer_is_withdrawn_between_two_chunks_fails() -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=16, sealed=False, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0)
    connected(world)
    world.end_read(0, works=True)

    world.withdraw(0)
    world.settle_everything()

    assert world.targets["fetch-0"].num_chunks == 1
    assert world.targets["fetch-0"].outcome is Outcome.FAILED


def test_a_fetch_of_an_offer_that_was_withdrawn_under_its_read_fails_though_all_has_landed() -> (
    None
):
    world = HandoffInterleavings()
    world.offer(num_tokens=NUM_TOKENS, sealed=True, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0)
    connected(world)

    world.withdraw(0)
    world.settle_everything()

    assert set(world.targets["fetch-0"].landed.values()) == {"overwritten"}
    assert world.targets["fetch-0"].outcome is Outcome.FAILED


def test_of_two_fetches_of_one_offer_one_completes() -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=NUM_TOKENS, sealed=True, ttl_s=8.0)

    world.fetch(0, timeout_s=60.0)
    world.fetch(0, timeout_s=60.0)
    world.settle_everything()

    outcomes = sorted(str(target.outcome) for target in world.targets.values())
    assert outcomes == [Outcome.COMPLETED, Outcome.FAILED]


@pytest.mark.parametrize("ahead", ["alone", "claims"])
def test_a_handoff_that_is_read_ahead_completes_with_the_right_kv(ahead: str) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=NUM_TOKENS, sealed=True, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    assert world.reads, "before the prefill agent was asked"

    world.settle_everything()

    assert world.targets["fetch-0"].outcome is Outcome.COMPLETED
    assert world.sources["offer-0"].outcome is Outcome.COMPLETED


@pytest.mark.parametrize("ahead", ["alone", "claims"])
def test_a_read_ahead_of_an_offer_that_is_withdrawn_under_it_fails_though_all_has_landed(
    ahead: str,
) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=NUM_TOKENS, sealed=True, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)

    world.withdraw(0)
    world.settle_everything()

    assert set(world.targets["fetch-0"].landed.values()) == {"overwritten"}
    assert world.targets["fetch-0"].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("ahead", "lasts_s"),
    [("altered", 0.0), ("altered", 1.0), ("altered claims", 0.0)],
    ids=["taken", "claimed in between", "claimed beside"],
)
def test_a_ticket_that_was_altered_is_read_and_its_fetch_fails(ahead: str, lasts_s: float) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=NUM_TOKENS, sealed=True, ttl_s=8.0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    world.pass_time(lasts_s, told=True)

    world.settle_everything()

    assert world.targets["fetch-0"].outcome is Outcome.FAILED
    assert world.sources["offer-0"].outcome is Outcome.EXPIRED


@pytest.mark.parametrize("ahead", ["", "alone", "claims"])
def test_of_a_reader_ahead_and_another_one_completes(ahead: str) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=NUM_TOKENS, sealed=True, ttl_s=8.0)

    world.fetch(0, timeout_s=60.0, ahead="alone")
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    world.settle_everything()

    outcomes = sorted(str(target.outcome) for target in world.targets.values())
    assert outcomes == [Outcome.COMPLETED, Outcome.FAILED]
