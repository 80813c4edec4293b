"""One story each: what a single fault at a chosen moment comes to."""

import pytest

from tests.sim.cluster import Fault, FaultKind, Settings, cluster_of
from tests.sim.handoffs import Plan
from tests.sim.worlds import DECODE, PREFILL, D, P

QUICK = Settings(prefill_config=PREFILL, decode_config=DECODE)
SLOW = Settings(prefill_config=PREFILL, decode_config=DECODE, part_s=0.2)


def test_what_nobody_hurts_completes() -> None:
    with cluster_of(QUICK) as cluster:
        handoff = cluster.give(Plan(num_tokens=20))

        cluster.settle()

    assert (handoff.ended_as, handoff.outcome) == ("completed", "completed")


def test_an_offer_that_nobody_fetches_expires() -> None:
    with cluster_of(QUICK) as cluster:
        handoff = cluster.give(Plan(fetch_after_s=None, ttl_s=3.0))

        cluster.settle()

    assert handoff.outcome == "expired"


def test_a_rendezvous_waits_for_its_offer() -> None:
    with cluster_of(QUICK) as cluster:
        handoff = cluster.give(Plan(meets=True, transfer_id="of-one-request-1", num_pieces=2))

        cluster.settle()

    assert handoff.ended_as == "completed"


def test_blocks_come_back_though_the_prefill_agent_is_frozen_under_the_read() -> None:
    freeze = Fault(kind=FaultKind.FREEZE_AGENT, role=P, at_s=0.1, lasts_s=60.0)
    with cluster_of(SLOW) as cluster:
        handoff = cluster.give(Plan(num_tokens=20, timeout_s=5.0))
        cluster.suffer([freeze])

        cluster.until(lambda: handoff.is_ended)
        cluster.until(lambda: handoff.is_freed)
        before_the_thaw = cluster.world.now
        cluster.settle()

    assert handoff.ended_as == "failed"
    assert before_the_thaw < 60.0


def test_an_engine_goes_on_with_the_next_process_of_its_agent() -> None:
    with cluster_of(QUICK) as cluster:
        for role in (P, D):
            cluster.suffer([Fault(kind=FaultKind.CRASH_AGENT, role=role, lasts_s=0.5)])
            cluster.until(lambda: cluster.is_over)
            cluster.run(2.0)
        handoff = cluster.give(Plan())

        cluster.settle()

    assert handoff.ended_as == "completed"


@pytest.mark.parametrize("away_s", [0.3 + 0.02 * step for step in range(30)])
def test_a_fetch_from_the_next_process_of_an_agent_does_not_end_with_the_one_before(
    away_s: float,
) -> None:
    """Who looked whether the first one is gone may hear of it when the next one is there."""
    away = Fault(kind=FaultKind.CRASH_AGENT, role=P, lasts_s=away_s)
    with cluster_of(QUICK) as cluster:
        cluster.give(Plan())
        cluster.settle()
        cluster.suffer([away])
        cluster.until(lambda: not cluster.engines[P, 0].is_ready)
        cluster.until(lambda: cluster.engines[P, 0].is_ready)
        handoffs = [cluster.give(Plan(), after_s=0.01 * number) for number in range(30)]

        cluster.settle()

    assert {handoff.ended_as for handoff in handoffs} == {"completed"}
