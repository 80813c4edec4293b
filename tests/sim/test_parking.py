"""Offers that are parked while something else happens to them, on virtual time.

Engines poison their blocks as soon as `released` reports them, so bytes from there are found.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvbus.protocol import Outcome
from tests.sim.cluster import Cluster, D, Fault, FaultKind, P, Settings, cluster_of
from tests.sim.handoffs import Handoff, Plan
from tests.sim.test_what_ends import SOON_S, moments, released_s
from tests.sim.worlds import HND, pools

LATE = Plan(num_tokens=24, fetch_after_s=1.0, park_after_s=0.0)
NUM_STEPS, STEP_S = 60, 50e-6
"""Times between the start of parking and a fetch."""
NEVER = Plan(num_tokens=24, fetch_after_s=None, park_after_s=0.0, ttl_s=3.0)


def mapped(settings: Settings) -> Settings:
    settings.prefill_config["mapped"] = settings.decode_config["mapped"] = True
    return settings


PATHS = {
    "direct": (pools(), "direct"),
    "staged": (pools(decode=HND, decode_config={"path": "staged"}), "staged"),
    "packed": (pools(decode=HND, decode_config={"path": "packed"}), "packed"),
    "mapped": (mapped(pools(thread_s=3e-4)), "mapped"),
    "compared": (pools(prefill=HND, decode_config={"digest": "full"}), "direct"),
}
SETTINGS = {name: settings for name, (settings, _) in PATHS.items()}


def parked(world: Cluster, plan: Plan = LATE) -> Handoff:
    """A handoff whose offer is parked, and whose fetch comes later."""
    handoff = world.give(plan)
    world.until(lambda: handoff.released)
    assert handoff.outcome is Outcome.PARKED
    return handoff


def made(world: Cluster, handoff: Handoff) -> None:
    world.until(lambda: handoff.offer is not None and handoff.offer.made.done())


def while_parking(world: Cluster, plan: Plan) -> Iterator[Handoff]:
    """Handoffs, each one event further than the one before, until it is parked by then."""
    num_events = 0
    while True:
        world.start()
        handoff = world.give(plan)
        made(world, handoff)
        world.after_events(num_events)
        if handoff.released:
            assert num_events > 5
            return
        yield handoff
        num_events += 1


@pytest.mark.parametrize("name", SETTINGS)
def test_a_parked_offer_is_read_from_the_pool(name: str) -> None:
    with cluster_of(SETTINGS[name]) as world:
        for _ in range(3):
            handoff = parked(world)
            assert world.count(P, "parked_offers") == 1
            assert world.end_of(handoff) == "completed"
            assert (handoff.num_bytes, handoff.attempts) == (handoff.content.nbytes, 1)
            world.until(lambda: not world.count(P, "parked_offers"), within_s=SOON_S)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fetch_completes_whenever_its_offer_is_parked(name: str) -> None:
    """What was read of the engine's blocks is read again from the pool."""
    num_parked = num_again = 0
    with cluster_of(SETTINGS[name]) as world:
        for step in range(NUM_STEPS):
            plan = Plan(num_tokens=64, park_after_s=0.0, fetch_after_s=step * STEP_S)
            handoff = world.give(plan)
            assert world.end_of(handoff) == "completed"
            released_s(world, handoff)
            num_parked += handoff.outcome is Outcome.PARKED
            num_again += handoff.num_bytes > handoff.content.nbytes
            assert handoff.attempts == 1
    assert 0 < num_parked < NUM_STEPS
    if name == "mapped":  # a fetch that acquires a lease before it reads is not parked under it
        assert num_again > 0


@pytest.mark.parametrize("num_pieces", [2, 4])
def test_open_offer_is_parked_after_its_seal(num_pieces: int) -> None:
    plan = Plan(num_tokens=30, num_pieces=num_pieces, gap_s=0.1, fetch_after_s=1.0)
    with cluster_of(pools()) as world:
        for at_s in (0.0, 0.05, 0.15, 0.25):
            handoff = world.give(plan)
            world.world.after(at_s, world.park, handoff)
            released_s(world, handoff)
            assert handoff.outcome is Outcome.PARKED
            assert world.world.now - handoff.sealed_at < 0.1
            assert world.end_of(handoff) == "completed"


def test_a_growing_offer_is_not_parked_under_its_reader() -> None:
    plan = Plan(num_tokens=30, num_pieces=3, gap_s=0.2, park_after_s=0.0)
    with cluster_of(pools(part_s=0.05)) as world:
        handoff = world.give(plan)
        assert world.end_of(handoff) == "completed"
        world.until(lambda: handoff.released)
        assert handoff.outcome is Outcome.COMPLETED


def test_withdrawal_at_any_moment_of_parking_ends_the_offer() -> None:
    outcomes = set()
    with cluster_of(pools()) as world:
        for handoff in while_parking(world, NEVER):
            assert handoff.offer is not None
            handoff.offer.withdraw()
            assert released_s(world, handoff) < SOON_S
            outcomes.add(handoff.outcome)
    assert Outcome.WITHDRAWN in outcomes
    assert outcomes <= {Outcome.WITHDRAWN, Outcome.PARKED}


def test_withdrawal_at_any_moment_of_parking_leaves_the_pool_to_others() -> None:
    """The copy may still write to the pool's blocks, which the next offer gets."""
    with cluster_of(pools(park_bytes=1 << 10, thread_s=1e-3)) as world:
        for handoff in while_parking(world, NEVER):
            assert handoff.offer is not None
            handoff.offer.withdraw()
            assert world.end_of(world.give(replace(LATE, fetch_after_s=0.2))) == "completed"
            released_s(world, handoff)


@pytest.mark.parametrize("name", SETTINGS)
def test_withdrawal_under_the_reader_of_a_pool_gives_no_wrong_byte(name: str) -> None:
    ends, least = set(), 3 if name == "mapped" else 6  # a copy and a swap are few events
    with cluster_of(SETTINGS[name]) as world:
        for handoff in moments(world, LATE, least=least):
            assert handoff.outcome is Outcome.PARKED
            assert handoff.offer is not None
            handoff.offer.withdraw()
            other = parked(world)  # it gets the blocks of the pool
            ends.add(world.end_of(handoff))
            assert world.end_of(other) == "completed"
            world.until(lambda: not world.count(P, "parked_offers"), within_s=SOON_S)
    assert ends == {"completed", "failed offer_withdrawn"}


def test_a_mapped_pool_is_read_and_committed_while_its_agent_is_frozen() -> None:
    """The event named the blocks and the cell, so the reader needs neither lease nor reply."""
    with cluster_of(SETTINGS["mapped"]) as world:
        assert world.end_of(parked(world)) == "completed"  # the route to the pool is known
        handoff = parked(world, replace(LATE, timeout_s=2.0))
        world.suffer(Fault(FaultKind.FREEZE_AGENT, lasts_s=4.0))
        assert world.end_of(handoff) == "completed"
        world.until(lambda: not world.count(P, "parked_offers"))


LOST = {
    "data process": (FaultKind.CRASH_DATA, "completed"),
    "connections": (FaultKind.BREAK, "completed"),
    "engine": (FaultKind.CRASH_ENGINE, "failed engine_lost"),
    "engine leaves": (FaultKind.LEAVE, "failed engine_lost"),
}


@pytest.mark.parametrize("name", LOST)
def test_loss_at_any_moment_of_parking_gives_no_wrong_byte(name: str) -> None:
    kind, ends = LOST[name]
    with cluster_of(pools()) as world:
        for handoff in while_parking(world, LATE):
            world.suffer(Fault(kind, lasts_s=0.1))
            assert world.end_of(handoff) in ("completed", ends)
            released_s(world, handoff)


@pytest.mark.parametrize("kind", [FaultKind.CRASH_ENGINE, FaultKind.LEAVE, FaultKind.CRASH_DATA])
def test_a_parked_offer_outlives_its_engine_and_its_data_process(kind: FaultKind) -> None:
    with cluster_of(pools()) as world:
        handoffs = [parked(world) for _ in range(3)]
        world.suffer(Fault(kind, lasts_s=0.2))
        assert {world.end_of(one) for one in handoffs} == {"completed"}
        world.start()
        assert world.end_of(parked(world)) == "completed"


def test_an_agent_that_ends_loses_its_pool_by_name() -> None:
    with cluster_of(pools()) as world:
        handoff = parked(world)
        world.suffer(Fault(FaultKind.CRASH_AGENT, lasts_s=0.1))
        assert world.end_of(handoff) == "failed offer_unknown"
        assert world.works()


def test_a_full_pool_leaves_offers_where_they_are() -> None:
    with cluster_of(pools(park_bytes=4 << 10)) as world:
        waiting = [world.give(Plan(num_tokens=100, fetch_after_s=2.0)) for _ in range(6)]
        world.run(0.1)
        for handoff in waiting:
            world.park(handoff)
        world.run(1.0)
        num_parked = sum(handoff.released for handoff in waiting)
        assert 0 < num_parked < len(waiting)
        assert {world.end_of(one) for one in waiting} == {"completed"}


def test_offers_with_the_most_time_left_are_parked_first() -> None:
    ttls = [5.0, 40.0, 10.0, 30.0, 20.0, 35.0]
    with cluster_of(pools(park_bytes=2 << 10)) as world:
        waiting = [world.give(Plan(num_tokens=32, fetch_after_s=None, ttl_s=one)) for one in ttls]
        world.run(0.1)
        for handoff in waiting:
            world.park(handoff)
        world.run(1.0)
        parked_s = {handoff.plan.ttl_s for handoff in waiting if handoff.released}
        kept_s = {handoff.plan.ttl_s for handoff in waiting if not handoff.released}
        assert parked_s
        assert min(parked_s) > max(kept_s)


def test_unread_parked_offers_expire_and_leave_the_pool() -> None:
    with cluster_of(pools()) as world:
        parked(world, NEVER)
        assert world.count(P, "parked_offers") == 1
        world.until(lambda: not world.count(P, "parked_offers"), within_s=NEVER.ttl_s + SOON_S)


def test_late_fetch_of_an_expired_parked_offer_fails_by_name() -> None:
    with cluster_of(pools()) as world:
        handoff = parked(world, Plan(fetch_after_s=5.0, park_after_s=0.0, ttl_s=3.0))
        assert world.end_of(handoff) == "failed offer_expired"


def test_decode_agent_that_crashes_reads_the_pool_again() -> None:
    with cluster_of(pools(part_s=5e-3)) as world:
        for handoff in moments(world, LATE):
            world.suffer(Fault(FaultKind.CRASH_AGENT, role=D, lasts_s=0.1))
            assert world.end_of(handoff) == "completed"
