"""Single handoffs through both tables, told step by step, in the world of the interleavings."""

import pytest

from kvbus.protocol import Outcome
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


@pytest.mark.parametrize("hint", [True, False], ids=["told of the seal", "not told"])
@pytest.mark.parametrize("ahead", ["alone", "claims"])
def test_a_ticket_that_is_faster_than_its_seal_is_read_at_once_and_completes_after_the_seal(
    ahead: str, hint: bool
) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=16, sealed=False, ttl_s=8.0)
    world.finish(0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    world.end_read(0, works=True)
    connected(world)
    assert world.targets["fetch-0"].outcome is None, "the prefill agent cannot say yes yet"

    world.compute(0, num_more=0, seal=True, hint=hint)
    connected(world)
    assert world.targets["fetch-0"].outcome is (Outcome.COMPLETED if hint else None)
    world.settle_everything()

    assert world.targets["fetch-0"].outcome is Outcome.COMPLETED
    assert world.sources["offer-0"].outcome is Outcome.COMPLETED


@pytest.mark.parametrize("ahead", ["alone", "claims"])
def test_a_seal_that_comes_while_the_take_is_under_way_is_not_missed(ahead: str) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=16, sealed=False, ttl_s=8.0)
    world.finish(0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    if ahead == "claims":
        connected(world)
    world.end_read(0, works=True)
    world.deliver(0, 1)  # the take, which is refused
    world.compute(0, num_more=0, seal=True, hint=True)
    connected(world)

    assert world.targets["fetch-0"].outcome is Outcome.COMPLETED


@pytest.mark.parametrize("ahead", ["alone", "claims"])
def test_an_engine_that_withdraws_in_place_of_the_seal_fails_what_was_read_ahead(
    ahead: str,
) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=16, sealed=False, ttl_s=8.0)
    world.finish(0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    world.end_read(0, works=True)
    connected(world)

    world.withdraw(0)
    world.settle_everything()

    assert world.targets["fetch-0"].outcome is Outcome.FAILED


@pytest.mark.parametrize("renewed", [True, False])
@pytest.mark.parametrize("ahead", ["altered", "altered claims"])
def test_an_altered_ticket_that_is_faster_than_the_seal_fails_when_that_has_come(
    ahead: str, renewed: bool
) -> None:
    world = HandoffInterleavings()
    world.offer(num_tokens=16, sealed=False, ttl_s=8.0)
    world.finish(0)
    world.fetch(0, timeout_s=60.0, ahead=ahead)
    connected(world)
    world.compute(0, num_more=0, seal=True, hint=renewed)

    world.settle_everything()

    assert world.targets["fetch-0"].outcome is Outcome.FAILED
    assert world.sources["offer-0"].outcome is Outcome.EXPIRED
